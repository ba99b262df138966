"""load_weights: plain checkpoints load bit for bit, in whatever order and shards, and modules are handed over whole."""

from __future__ import annotations

import gc
import random
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from checkpoints import (
    assert_same_weights,
    config_of,
    empty_model,
    load,
    one_line,
    weights_of,
    write_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import stock_model
from torch import Tensor, nn
from transformers import Qwen2Config

from npu_tuned_model.checkpoint import load_weights, unfused_state_dict
from npu_tuned_model.config import read_config
from npu_tuned_model.errors import CheckpointError

CPU = torch.device("cpu")


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
