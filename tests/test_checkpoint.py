"""Contract of npu_tuned_model/checkpoint.py: plain checkpoints load bit for bit, wrong ones are named and refused."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from checkpoints import config_of, edit_json, empty_model, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from models import stock_model
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import checkpoint, load_model
from npu_tuned_model.checkpoint import WeightSource, load_weights, unfused_state_dict
from npu_tuned_model.config import read_config, resolve_checkpoint
from npu_tuned_model.errors import CheckpointError, UserError

CPU = torch.device("cpu")
Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
MIB = 2**20


def load(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: object) -> nn.Module:
    model = empty_model(read_config(folder))
    load_weights(model, folder, dtype=dtype, device=CPU, **kwargs)
    return model


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def weights_of(config: Qwen2Config) -> dict[str, Tensor]:
    """Random weights by name as transformers keeps them; lm_head is listed also when it is tied."""
    return dict(stock_model(config).state_dict())


@pytest.fixture
def untied(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A good checkpoint in two shards, q and k in the first and v in the second, to be damaged by a test."""
    config = config_of(layers=1)
    weights = weights_of(config)
    second = {name: weights[name] for name in weights if ".v_proj." in name or ".mlp." in name}
    first = {name: weights[name] for name in weights if name not in second}
    return write_checkpoint(tmp_path / "model", config, [first, second]), weights


def one_line(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(excinfo.value)
    assert isinstance(excinfo.value, UserError)
    assert "\n" not in message
    return message


# round trip

shapes = st.builds(
    lambda kv_heads, group, half_dim, layers, tied: config_of(kv_heads * group, kv_heads, 2 * half_dim, layers, tied),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)


@given(
    config=shapes,
    safe_serialization=st.booleans(),
    shard_size=st.sampled_from(["2KB", "5KB", "20KB", "1GB"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=25, deadline=None)
def test_a_stock_checkpoint_comes_back_bit_for_bit(
    config: Qwen2Config, safe_serialization: bool, shard_size: str, dtype: torch.dtype
) -> None:
    stock = stock_model(config).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(folder, safe_serialization=safe_serialization, max_shard_size=shard_size)
        model = load(Path(folder), dtype)
    assert_same_weights(unfused_state_dict(model), stock.state_dict())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings


@given(config=shapes, shards=st.integers(1, 6), safe_serialization=st.booleans(), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_pieces_may_come_in_any_order_and_from_any_shard(
    config: Qwen2Config, shards: int, safe_serialization: bool, seed: int
) -> None:
    weights = weights_of(config)
    names = list(weights)
    random.Random(seed).shuffle(names)
    parts = [part for part in (names[start::shards] for start in range(shards)) if part]
    with tempfile.TemporaryDirectory() as folder:
        tables = [{name: weights[name] for name in part} for part in parts]
        model = load(write_checkpoint(Path(folder), config, tables, safe_serialization))
    assert_same_weights(unfused_state_dict(model), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_cast_to_the_dtype_asked_for(untied: tuple[Path, dict[str, Tensor]], dtype: torch.dtype) -> None:
    folder, weights = untied
    model = load(folder, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_same_weights(unfused_state_dict(model), {name: tensor.to(dtype) for name, tensor in weights.items()})


def test_fused_rows_are_query_key_value_and_gate_up(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    layer = load(folder).model.layers[0]
    for attribute in ("weight", "bias"):
        rows = [weights[f"model.layers.0.self_attn.{letter}_proj.{attribute}"] for letter in "qkv"]
        assert torch.equal(getattr(layer.self_attn.qkv, attribute), torch.cat(rows))
    rows = [weights[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(rows))


def test_safetensors_are_preferred_to_bin_files(tmp_path: Path) -> None:
    config = config_of()
    weights = weights_of(config)
    write_checkpoint(tmp_path, config, [{name: tensor + 1 for name, tensor in weights.items()}], False)
    write_checkpoint(tmp_path, config, [weights], True)
    assert_same_weights(unfused_state_dict(load(tmp_path)), weights)


# back to transformers


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("safe_serialization", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_transformers_saves_and_reads_the_unfused_weights(
    tmp_path: Path, tied: bool, safe_serialization: bool, packed: bool
) -> None:
    """Transformers drops tensors that share a storage, and safetensors refuses strided ones: neither may happen."""
    stock = stock_model(config_of(tied=tied))
    stock.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in", device="cpu", dtype="float32") if packed else load(tmp_path / "in")
    stock.save_pretrained(
        tmp_path / "out",
        state_dict=unfused_state_dict(model),
        safe_serialization=safe_serialization,
        max_shard_size="4KB",
    )
    again, report = StockQwen2.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert_same_weights(again.state_dict(), stock.state_dict())


def test_unfused_pieces_are_views(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = load(untied[0])
    state = unfused_state_dict(model)
    model.model.layers[0].self_attn.qkv.weight.data.fill_(7)
    model.model.layers[0].mlp.gate_up_proj.weight.data.fill_(8)
    for name, value in {"self_attn.k_proj": 7, "self_attn.v_proj": 7, "mlp.up_proj": 8}.items():
        assert (state[f"model.layers.0.{name}.weight"] == value).all()


class Transposed(nn.Module):
    """A packed form whose dense weight is strided and which holds parameters that no checkpoint knows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.ParameterList([nn.Parameter(linear.weight.detach().t().contiguous())])
        self.bias = linear.bias

    def dense_weight(self) -> Tensor:
        return self.inner[0].t()


def test_unfusing_asks_packed_modules_for_their_dense_weight(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    model = load(folder)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Transposed(module))
    state = unfused_state_dict(model)
    assert_same_weights(state, weights)
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_unfusing_refuses_head_counts_that_do_not_add_up(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = load(untied[0])
    model.config.num_key_value_heads = 1
    with pytest.raises(ValueError, match=r"self_attn\.qkv\.weight has shape \(32, 16\), model\.config asks for 16 \+ 4 \+ 4"):
        unfused_state_dict(model)


# tied embeddings


def tied_checkpoint(folder: Path, head_first: bool, **replaced: Tensor | None) -> tuple[Path, dict[str, Tensor]]:
    config = config_of(tied=True)
    weights = weights_of(config)
    stored = {name: tensor for name, tensor in {**weights, **replaced}.items() if tensor is not None}
    head = {"lm_head.weight": stored.pop("lm_head.weight")} if "lm_head.weight" in stored else {}
    shards = [head, stored] if head_first else [stored, head]
    return write_checkpoint(folder, config, [shard for shard in shards if shard]), weights


@pytest.mark.parametrize("head_first", [False, True])
def test_an_equal_head_in_a_tied_checkpoint_is_accepted(tmp_path: Path, head_first: bool) -> None:
    folder, weights = tied_checkpoint(tmp_path, head_first)
    assert_same_weights(unfused_state_dict(load(folder)), weights)


@pytest.mark.parametrize("head_first", [False, True])
def test_a_different_head_in_a_tied_checkpoint_is_refused(tmp_path: Path, head_first: bool) -> None:
    head = torch.zeros(40, 16)
    folder, _ = tied_checkpoint(tmp_path, head_first, **{"lm_head.weight": head})
    ready: list[str] = []
    with pytest.raises(CheckpointError, match=r"differ although config\.json sets tie_word_embeddings") as excinfo:
        load(folder, on_ready=lambda name, _: ready.append(name))
    one_line(excinfo)
    assert "model.embed_tokens" not in ready


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_of_two_tied_names_is_enough(tmp_path: Path, dropped: str) -> None:
    folder, weights = tied_checkpoint(tmp_path, True, **{dropped: None})
    assert_same_weights(unfused_state_dict(load(folder)), weights)


# on_ready


@pytest.mark.parametrize("tied", [False, True])
def test_on_ready_is_called_once_per_module_with_all_its_weights(tmp_path: Path, tied: bool) -> None:
    config = config_of(tied=tied)
    weights = weights_of(config)
    # One tensor per shard, in an order that leaves most modules half filled for long.
    names = sorted(weights, key=lambda name: name[::-1])
    folder = write_checkpoint(tmp_path, config, [{name: weights[name]} for name in names])
    calls: list[str] = []

    def on_ready(name: str, module: nn.Module) -> None:
        calls.append(name)
        assert all(not parameter.is_meta for parameter in module.parameters(recurse=False))
        if name in ("model.embed_tokens", "lm_head") and tied:
            assert model.lm_head.weight is model.model.embed_tokens.weight

    model = empty_model(config)
    load_weights(model, folder, dtype=torch.float32, device=CPU, on_ready=on_ready)
    owners = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    assert sorted(calls) == sorted(owners)
    if tied:
        assert calls.index("lm_head") == calls.index("model.embed_tokens") + 1
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_module_replaced_in_on_ready_stays_replaced_and_is_freed(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    model = empty_model(read_config(folder))
    replaced: list[weakref.ref[Tensor]] = []

    def on_ready(name: str, module: nn.Module) -> None:
        assert [weight() for weight in replaced] == [None] * len(replaced)
        if isinstance(module, nn.Linear):
            replaced.append(weakref.ref(module.weight))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())

    gc.disable()  # a reference cycle would hide behind a collection that happens to run
    try:
        load_weights(model, folder, dtype=torch.float32, device=CPU, on_ready=on_ready)
        assert len(replaced) == 5
        assert [weight() for weight in replaced] == [None] * 5
    finally:
        gc.enable()
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


def test_an_error_in_on_ready_is_not_taken_for_a_damaged_file(untied: tuple[Path, dict[str, Tensor]]) -> None:
    def on_ready(name: str, module: nn.Module) -> None:
        raise RuntimeError("no memory for another layout")

    with pytest.raises(RuntimeError, match="no memory for another layout"):
        load(untied[0], on_ready=on_ready)


def test_buffers_and_requires_grad_are_left_alone(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = empty_model(read_config(untied[0]))
    model.lm_head.requires_grad_(False)
    buffers = dict(model.named_buffers())
    load_weights(model, untied[0], dtype=torch.float32, device=CPU)
    assert buffers
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert not model.lm_head.weight.requires_grad
    assert model.model.embed_tokens.weight.requires_grad


def test_a_model_that_has_weights_already_is_refused(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = empty_model(read_config(untied[0])).to_empty(device="cpu")
    with pytest.raises(ValueError, match="is on cpu: build the model on the meta device"):
        load_weights(model, untied[0], dtype=torch.float32, device=CPU)


# weights that are wrong


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    write_checkpoint(folder, read_config(folder), [weights])


def refused(folder: Path) -> str:
    """The message with which loading is refused, before any weight is in place."""
    model = empty_model(read_config(folder))
    with pytest.raises(CheckpointError) as excinfo:
        load_weights(model, folder, dtype=torch.float32, device=CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    return one_line(excinfo)


def test_missing_weights_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {name: tensor for name, tensor in weights.items() if ".k_proj." not in name})
    message = refused(folder)
    assert "lacks weights" in message
    assert "layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.k_proj.weight" in message


def test_of_many_missing_weights_eight_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {"model.norm.weight": weights["model.norm.weight"]})
    message = refused(folder)
    assert f"... ({len(weights) - 1} in all)" in message
    assert message.count("model.") + message.count("lm_head") == 8


def test_left_over_weights_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, "model.layers.1.input_layernorm.weight": torch.ones(16)})
    message = refused(folder)
    assert "does not: model.layers.1.input_layernorm.weight" in message


def test_rotary_tables_of_old_checkpoints_are_ignored(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert_same_weights(unfused_state_dict(load(folder)), weights)


def test_a_wrong_shape_names_both_shapes(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, Q_WEIGHT: torch.zeros(8, 16)})
    message = refused(folder)
    assert f"{Q_WEIGHT} has shape (8, 16), config.json asks for (16, 16)" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(untied: tuple[Path, dict[str, Tensor]], dtype: torch.dtype) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, Q_WEIGHT: weights[Q_WEIGHT].to(dtype)})
    message = refused(folder)
    assert f"{Q_WEIGHT} is of {dtype}: quantised" in message


# files that are wrong


def test_a_folder_without_weights_is_refused(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    for file in folder.glob("model*"):
        file.unlink()
    assert "holds no weights: expected model.safetensors" in refused(folder)


def test_all_missing_shards_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    assert "shards are missing: model-00000.safetensors, model-00001.safetensors" in refused(folder)


@pytest.mark.parametrize("safe_serialization", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, safe_serialization: bool, kept: float) -> None:
    config = config_of()
    weights = weights_of(config)
    half = len(weights) // 2
    items = list(weights.items())
    folder = write_checkpoint(tmp_path, config, [dict(items[:half]), dict(items[half:])], safe_serialization)
    (file,) = folder.glob("*model-00001.*")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    message = refused(folder)
    assert f"{file} cannot be read, it is truncated or corrupt" in message
    assert message.endswith("download it again")


def test_a_git_lfs_pointer_is_recognised(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    (folder / "model-00001.safetensors").write_text(pointer)
    assert refused(folder).endswith("is a Git LFS pointer, not the weights: run 'git lfs pull'")


def test_a_file_without_read_permission_is_not_called_damaged(
    untied: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by chmod: tests may run as root, whom no mode keeps out.
    monkeypatch.setattr(checkpoint, "safe_open", denied)
    assert refused(untied[0]).endswith("(PermissionError: [Errno 13] Permission denied): check its permissions")


def test_a_bin_file_that_is_no_table_of_tensors_is_refused(tmp_path: Path) -> None:
    config = config_of()
    folder = write_checkpoint(tmp_path, config, [weights_of(config)], safe_serialization=False)
    torch.save({"state_dict": weights_of(config)}, folder / "pytorch_model.bin")
    assert "is not a plain table of tensors" in refused(folder)


def test_a_bin_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    config = config_of()
    folder = write_checkpoint(tmp_path, config, [weights_of(config)], safe_serialization=False)
    torch.save({"weight": Path("/")}, folder / "pytorch_model.bin")
    assert "cannot be read" in refused(folder)


def change_weight_map(folder: Path, name: str, file: str | None) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    if file is None:
        del weight_map[name]
    else:
        weight_map[name] = file
    edit_json(index, weight_map=weight_map)


def test_a_tensor_that_its_shard_lacks_is_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    change_weight_map(untied[0], "model.layers.9.mlp.up_proj.weight", "model-00000.safetensors")
    message = refused(untied[0])
    assert "model-00000.safetensors lacks tensors that the index lists for it: model.layers.9.mlp.up_proj" in message


def test_a_tensor_that_the_index_does_not_list_is_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    change_weight_map(untied[0], Q_WEIGHT, None)
    message = refused(untied[0])
    assert f"model-00000.safetensors holds tensors that the index does not list for it: {Q_WEIGHT}" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_named(untied: tuple[Path, dict[str, Tensor]], content: str) -> None:
    (untied[0] / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(untied[0])


# memory


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if str(folder) in line}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("safe_serialization", [False, True])
def test_one_shard_is_open_at_a_time(tmp_path: Path, safe_serialization: bool) -> None:
    config = config_of()
    items = list(weights_of(config).items())
    shards = [dict(items[start::4]) for start in range(4)]
    folder = write_checkpoint(tmp_path, config, shards, safe_serialization)

    def seen(source: WeightSource) -> Iterator[set[str]]:
        for _, tensor in source:
            yield mapped_files(folder)
            del tensor

    source = WeightSource(folder)
    assert not mapped_files(folder)
    open_files = list(seen(source))
    assert all(len(files) == 1 for files in open_files)
    assert len(set.union(*open_files)) == 4
    assert not mapped_files(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("safe_serialization", [False, True])
def test_loading_closes_a_shard_before_it_opens_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe_serialization: bool
) -> None:
    items = list(weights_of(config_of()).items())
    folder = write_checkpoint(tmp_path, config_of(), [dict(items[start::4]) for start in range(4)], safe_serialization)
    place, name = (checkpoint, "safe_open") if safe_serialization else (torch, "load")
    open_shard = getattr(place, name)
    open_before: list[set[str]] = []

    def observed(*args: object, **kwargs: object) -> object:
        open_before.append(mapped_files(folder))
        return open_shard(*args, **kwargs)

    monkeypatch.setattr(place, name, observed)
    load(folder)
    assert open_before == [set()] * 8  # four shards, their headers first


MEASURE = """
import sys
from pathlib import Path
import torch
from checkpoints import empty_model
from npu_tuned_model.checkpoint import load_weights
from npu_tuned_model.config import read_config

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])

folder = Path(sys.argv[1])
model = empty_model(read_config(folder))
before = kilobytes("VmRSS")
load_weights(model, folder, dtype=torch.float32, device=torch.device("cpu"))
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_is_the_weights_and_one_shard(tmp_path: Path) -> None:
    config = config_of(heads=8, kv_heads=2, head_dim=64, layers=6)
    config.intermediate_size, config.vocab_size = 2048, 16384
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in StockQwen2(config).state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 16 * MIB:
            shards.append({})
        shards[-1][name] = torch.ones(shape)
    largest = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
    weights = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    folder = write_checkpoint(tmp_path / "large", config, shards)
    del shards

    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    allocator = 16 * MIB  # what the allocator and the first use of a library take, whatever the size of the model
    assert weights < int(run.stdout) <= 1.1 * (weights + largest) + allocator


# config.json


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    config_of(heads=4, kv_heads=2, head_dim=4).save_pretrained(tmp_path)
    return tmp_path


def test_a_good_config_is_read(config_folder: Path) -> None:
    edit_json(config_folder / "config.json", torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=None)
    config = read_config(config_folder)
    assert isinstance(config, Qwen2Config)
    assert (config.hidden_size, config.num_key_value_heads, config.rope_theta) == (16, 2, 5e5)
    assert config.torch_dtype == torch.bfloat16


def test_keys_of_newer_transformers_are_understood(config_folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    edit_json(config_folder / "config.json", dtype="bfloat16", rope_theta=..., rope_parameters=rope)
    config = read_config(config_folder)
    assert config.rope_theta == 1e6
    assert config.torch_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": "qwen2_moe"}, "mixture-of-experts is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is {'type': 'yarn', 'factor': 4.0}"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "only rope_type 'default'"),
        ({"rope_parameters": {"rope_type": "default"}}, "only rope_type 'default' with a rope_theta"),
        ({"use_sliding_window": True, "sliding_window": 63}, "set use_sliding_window to false if prompts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is present"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"hidden_size": 18}, "hidden_size 18 is not divisible by 4 attention heads"),
        ({"head_dim": 8}, "head_dim is 8, only hidden_size / num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive whole number"),
        ({"vocab_size": "40"}, "vocab_size is '40'"),
        ({"intermediate_size": ...}, "intermediate_size is None"),
    ],
)
def test_a_config_that_the_model_cannot_run_is_refused(
    config_folder: Path, changes: dict[str, object], message: str
) -> None:
    edit_json(config_folder / "config.json", **changes)
    with pytest.raises(CheckpointError) as excinfo:
        read_config(config_folder)
    assert message in one_line(excinfo)
    assert str(config_folder / "config.json") in one_line(excinfo)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"head_dim": 4},
        {"quantization_config": None},
    ],
)
def test_a_harmless_setting_is_accepted(config_folder: Path, changes: dict[str, object]) -> None:
    edit_json(config_folder / "config.json", **changes)
    assert read_config(config_folder).hidden_size == 16


@pytest.mark.parametrize("content", ["", "{", "[1]", "\ufeff{}"])
def test_a_damaged_config_is_refused(config_folder: Path, content: str) -> None:
    (config_folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json .*download it again") as excinfo:
        read_config(config_folder)
    one_line(excinfo)


def test_a_missing_folder_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_config(tmp_path / "nowhere")


# Hub


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked for a local folder")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_checkpoint("owner/name") == Path("owner/name")
    assert resolve_checkpoint(tmp_path) == tmp_path
    for wrong in (tmp_path / "nowhere", "nowhere", "a/b/c", "./owner/nothing", "../nothing"):
        with pytest.raises(CheckpointError, match="give a local folder or the id of a Hub model"):
            resolve_checkpoint(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint("file")


class FakeHub:
    """Stands in for the hub: what matches the patterns asked for appears in the local folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files, self.calls = folder, files, 0

    def __call__(self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repo_id == "owner/name-2.5"
        self.calls += 1
        for file in huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (self.folder / str(file)).touch()
        return str(self.folder)


SMALL_FILES = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "vocab.json"]
UNWANTED = ["README.md", "optimizer.bin", "training_args.bin", "original/model.safetensors"]


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model-00001-of-00001.bin"], ["pytorch_model-00001-of-00001.bin"]),
    ],
)
def test_the_hub_is_asked_for_no_more_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str], fetched: list[str]
) -> None:
    hub = FakeHub(tmp_path, SMALL_FILES + UNWANTED + weights)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_checkpoint("owner/name-2.5") == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(SMALL_FILES + fetched)


@pytest.mark.parametrize(
    "error", [OSError("no route\nto host"), huggingface_hub.errors.LocalEntryNotFoundError("offline"), KeyError()]
)
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="owner/name is not a local folder and could not be fetched") as excinfo:
        resolve_checkpoint("owner/name")
    assert type(error).__name__ in one_line(excinfo)
    assert excinfo.value.__cause__ is error
