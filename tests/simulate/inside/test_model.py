"""Models on the simulated NPU: the CPU's tokens in every mode, and its very bits where the same operators run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2ForCausalLM as StockQwen2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models import padded_batch, save, stock_model, tiny_config

from npu_tuned_model import GraphOptions, Qwen2ForCausalLM, TuningOptions, UserError, load, load_model
from npu_tuned_model.compile_cache import fingerprint
from npu_tuned_model.linear import InputMajorLinear
from npu_tuned_model.npu_setup import NpuSetup, TiledLinear, prepare_weights, set_up

IDS, MASK = padded_batch([7, 12])
TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stock_model(tiny_config("mha_4_head_64")), tmp_path_factory.mktemp("tiny"))


def generate(model: Any, device: str) -> Tensor:
    tokens = model.generate(
        IDS.to(device), attention_mask=MASK.to(device), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )
    return tokens[:, IDS.shape[1] :].cpu()


def logits(model: Qwen2ForCausalLM, device: str, new: Tensor) -> Tensor:
    cache = model.new_cache(len(IDS), IDS.shape[1] + new.shape[1])
    steps = [model(IDS.to(device), attention_mask=MASK.to(device), past_key_values=cache).logits]
    for column in range(new.shape[1]):
        steps.append(model(new[:, column : column + 1].to(device), past_key_values=cache).logits)
    return torch.cat(steps, dim=1).cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eager_logits_are_the_bits_of_the_cpu(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    npu = load_model(folder, device="npu", dtype=dtype)
    # the CPU with the NPU's layers: packed weights and C++ kernels add up in another order
    monkeypatch.setattr(
        load, "packer_for", lambda *given, **kernels: lambda linear, sizes: InputMajorLinear(linear.weight, linear.bias)
    )
    cpu = load_model(folder, device="cpu", dtype=dtype, options=TuningOptions(native_kernels=False))
    tokens = generate(cpu, "cpu")
    assert torch.equal(generate(npu, "npu"), tokens)
    assert torch.equal(logits(npu, "npu", tokens), logits(cpu, "cpu", tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "max-autotune", "reduce-overhead", "npugraph_ex"])
def test_tokens_are_the_cpus_in_every_mode(folder: Path, dtype: str, mode: str) -> None:
    expected = generate(load_model(folder, device="cpu", dtype=dtype), "cpu")
    model = load_model(folder, device="npu", dtype=dtype)
    if mode != "eager":
        model.run_graph(GraphOptions(torchair_mode=mode))
    assert torch.equal(generate(model, "npu"), expected)
    assert torch.equal(generate(model, "npu"), expected)
    if mode != "eager":
        assert dict(model.steps.graphs) == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("off", ["all", "flash_attention", "fixed_kv_cache", "fused_rope", "fused_qkv", "kv_lengths"])
def test_switched_off_optimisations_change_no_token(folder: Path, off: str) -> None:
    options = TuningOptions.none() if off == "all" else TuningOptions().replace(**{off: False})
    expected = generate(load_model(folder, device="cpu", dtype="float32"), "cpu")
    assert torch.equal(generate(load_model(folder, device="npu", dtype="float32", options=options), "npu"), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_stock_transformers_runs_too(folder: Path, attention: str) -> None:
    model = StockQwen2.from_pretrained(folder, attn_implementation=attention).eval()
    expected, expected_logits = generate(model, "cpu"), model(IDS, attention_mask=MASK).logits
    model = model.to("npu")
    assert torch.equal(generate(model, "npu"), expected)
    if attention == "eager":
        assert torch.equal(model(IDS.npu(), attention_mask=MASK.npu()).logits.cpu(), expected_logits)


def test_the_set_up_of_an_npu(folder: Path, tmp_path: Path) -> None:
    prepared = set_up(NpuSetup(core_binding=False), torch.device("npu"), ranks=2)
    assert "HCCL_CONNECT_TIMEOUT=" in prepared.done["hccl_variables"]
    assert prepared.done["jit_compile"] == "off: prebuilt operators"
    model = load_model(folder, device="npu", dtype="bfloat16")
    expected = generate(model, "npu")
    prepare_weights(prepared, model)
    tiled = [module for module in model.modules() if isinstance(module, TiledLinear)]
    # four in each of two layers, and the untied output layer
    assert len(tiled) == 9
    assert all(torch_npu.get_npu_format(module.weight) == 29 for module in tiled)
    assert torch_npu.get_npu_format(model.model.embed_tokens.weight) == 2
    assert torch.equal(generate(model, "npu"), expected)
    model.run_graph()
    assert torch.equal(generate(model, "npu"), expected)
    # what is saved is the plain checkpoint, bit for bit
    model.save_pretrained(tmp_path)
    original, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(original)
    assert all(torch.equal(saved[name], original[name].bfloat16()) for name in original)


def test_weights_used_in_slices_stay_plain(folder: Path) -> None:
    prepared = set_up(NpuSetup(core_binding=False), torch.device("npu"))
    model = load_model(folder, device="npu", options=TuningOptions().replace(fused_qkv=False))
    prepare_weights(prepared, model)
    layer = model.model.layers[0]
    assert not isinstance(layer.self_attn.qkv, TiledLinear)
    assert isinstance(layer.self_attn.o_proj, TiledLinear)
    plain = load_model(folder, device="npu", options=TuningOptions().replace(packed_weights=False))
    prepared = set_up(NpuSetup(core_binding=False), torch.device("npu"))
    prepare_weights(prepared, plain)
    assert "no layer" in prepared.not_done["nz_weights"]


def test_head_sizes_that_the_rotary_kernel_lacks_are_refused(tmp_path: Path) -> None:
    model = load_model(save(stock_model(tiny_config("gqa_4_2_head_16")), tmp_path), device="npu")
    with pytest.raises((UserError, ValueError), match="16"):
        generate(model, "npu")


_CACHED = """
import sys, torch
from pathlib import Path
from npu_tuned_model import GraphOptions, load_model
model = load_model(sys.argv[1], device="npu", dtype="float32")
model.run_graph(GraphOptions(compile_cache=Path(sys.argv[2])))
for batch in (2, 1):
    ids = torch.arange(batch * 12).reshape(batch, 12).npu()
    print(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8).tolist())
print(dict(model.steps.graphs))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_the_next_process_loads_its_graphs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_CACHED)
    runs = []
    for _ in range(2):
        command = ["npu_tuned_model.simulate.run_script", tmp_path / "script.py", folder, tmp_path / "cache"]
        result = subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        runs.append([line for line in result.stdout.splitlines() if not line.startswith("simulated NPU")])
    compiled, loaded = runs
    assert compiled[:2] == loaded[:2]
    assert compiled[2:] == ["{'prefill': 2, 'decode': 2}", "4"]
    assert loaded[2:] == ["{'prefill': 2, 'decode': 2}", "0"]
    cpu = load_model(folder, device="cpu", dtype="float32")
    ids = torch.arange(24).reshape(2, 12)
    expected = cpu.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8)
    assert loaded[0] == str(expected.tolist())


def test_the_cache_depends_on_releases_chip_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {fingerprint("model"), fingerprint("another model")}
    monkeypatch.setattr(torch_npu.npu.utils, "get_cann_version", lambda: "9.0.0")
    names.add(fingerprint("model"))
    monkeypatch.setattr(torch_npu, "__version__", "2.13.0.post1")
    names.add(fingerprint("model"))
    assert len(names) == 4
