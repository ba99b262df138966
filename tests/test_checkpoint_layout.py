"""checkpoint_layout: an equal row split of the fused weights gives every rank the q, k, v, gate and up that it would
get one by one; what does not divide is refused with the sizes that work."""

from __future__ import annotations

import pytest
import torch
from checkpoints import config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2Config

from npu_tuned_model import UserError
from npu_tuned_model.checkpoint_convert import merge_recipes, unmerge_recipes
from npu_tuned_model.checkpoint_layout import (
    EMBEDDING,
    Shard,
    check_tp_size,
    converted_tp_size,
    parameter_names,
    pieces_of,
    vocabulary_cut,
)
from npu_tuned_model.checkpoint_rows import Rows
from npu_tuned_model.errors import CheckpointError


@st.composite
def divided_models(draw: st.DrawFn) -> tuple[Qwen2Config, int]:
    """A model and a number of ranks that divides it: fewer or more KV heads than ranks, with and without groups."""
    size = draw(st.integers(1, 8))
    kv_heads = draw(st.sampled_from([n for n in range(1, 17) if n % size == 0 or size % n == 0]))
    heads = max(kv_heads, size) * draw(st.integers(1, 3))
    config = config_of(heads, kv_heads, 2 * draw(st.integers(1, 3)), layers=1)
    config.intermediate_size = size * draw(st.integers(1, 5))
    config.vocab_size = draw(st.integers(size, 50))
    return config, size


def source_tensors(config: Qwen2Config) -> dict[str, Tensor]:
    """Every tensor of a plain checkpoint, each element of its own value."""
    tensors, first = {}, 0
    for name in parameter_names(config):
        for piece in pieces_of(name, config):
            count = int(torch.tensor(piece.source_shape).prod())
            tensors[piece.source] = torch.arange(first, first + count).view(piece.source_shape)
            first += count
    return tensors


def assemble(parts: list[Rows], tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[part.source][part.start : part.start + part.length] for part in parts])


def heads_of(tensor: Tensor, head_dim: int) -> Tensor:
    return tensor.unflatten(0, (-1, head_dim))


@given(divided_models())
@settings(max_examples=25, deadline=None)
def test_an_equal_split_of_the_fused_rows_is_the_split_of_each(model: tuple[Qwen2Config, int]) -> None:
    config, size = model
    check_tp_size(config, size)
    tensors = source_tensors(config)
    fused = {name: assemble(parts, tensors) for name, parts in merge_recipes(config, size).items()}
    head_dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    for attribute in ("weight", "bias"):
        query, key, value = (
            heads_of(tensors[f"model.layers.0.self_attn.{letter}_proj.{attribute}"], head_dim) for letter in "qkv"
        )
        for rank, part in enumerate(fused[f"model.layers.0.self_attn.qkv.{attribute}"].chunk(size)):
            mine = heads_of(part, head_dim)
            heads = config.num_attention_heads // size
            kv_heads = (mine.shape[0] - heads) // 2
            assert kv_heads == max(config.num_key_value_heads // size, 1)
            assert torch.equal(mine[:heads], query.chunk(size)[rank])
            # The rule itself, head by head: query head h attends to KV head h // group.
            for local, head in enumerate(range(rank * heads, (rank + 1) * heads)):
                local_kv = local // (heads // kv_heads)
                assert torch.equal(mine[heads + local_kv], key[head // group])
                assert torch.equal(mine[heads + kv_heads + local_kv], value[head // group])
    gate, up = (tensors[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up"))
    for rank, part in enumerate(fused["model.layers.0.mlp.gate_up_proj.weight"].chunk(size)):
        assert torch.equal(part, torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]))


@given(divided_models())
@settings(max_examples=25, deadline=None)
def test_unmerging_gives_every_tensor_back(model: tuple[Qwen2Config, int]) -> None:
    config, size = model
    tensors = source_tensors(config)
    fused = {name: assemble(parts, tensors) for name, parts in merge_recipes(config, size).items()}
    back = unmerge_recipes(config, size)
    assert len(back) == 8
    for name, parts in back.items():
        assert torch.equal(assemble(parts, fused), tensors[name]), name


@given(divided_models())
@settings(max_examples=25, deadline=None)
def test_every_rank_reads_the_same_from_a_plain_and_from_a_converted_checkpoint(
    model: tuple[Qwen2Config, int],
) -> None:
    config, size = model
    plain = source_tensors(config)
    converted = {**plain, **{name: assemble(parts, plain) for name, parts in merge_recipes(config, size).items()}}

    def read(name: str, rank: int, source: dict[str, Tensor], is_converted: bool) -> Tensor:
        pieces = pieces_of(name, config, Shard(rank, size), converted=is_converted)
        for piece in pieces:
            assert source[piece.source].shape == piece.source_shape
        dim = pieces[0].dim
        return torch.cat([source[piece.source].narrow(dim, piece.start, piece.length) for piece in pieces], dim)

    for name in parameter_names(config):
        parts = [read(name, rank, plain, False) for rank in range(size)]
        for rank, part in enumerate(parts):
            assert torch.equal(part, read(name, rank, converted, True)), name
        if "norm" not in name and "qkv" not in name and "gate_up" not in name:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(parts, dim), plain[name]), name


def test_any_vocabulary_is_divided_into_shares_that_differ_by_one_at_most() -> None:
    config = config_of()
    config.vocab_size = 151936 + 3
    cuts = [vocabulary_cut(config, Shard(rank, 7)) for rank in range(7)]
    assert [cut.start for cut in cuts[1:]] == [cut.start + cut.length for cut in cuts[:-1]]
    assert cuts[0].start == 0
    assert sum(cut.length for cut in cuts) == config.vocab_size
    assert max(cut.length for cut in cuts) - min(cut.length for cut in cuts) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "size", "reason", "works"),
    [
        (14, 2, 4864, 8, "14 attention heads over 8 ranks", "1, 2"),
        (28, 4, 18944, 8, "28 attention heads over 8 ranks", "1, 2, 4"),
        (64, 8, 29568, 3, "64 attention heads over 3 ranks", "1, 2, 4, 8, 16, 32, 64"),
        (12, 2, 8960, 3, "2 key and value heads over 3 ranks", "1, 2, 4"),
        (12, 2, 8960, 6, "intermediate_size 8960 over 6 ranks", "1, 2, 4"),
        (4, 4, 16, 0, "it must be at least 1", "1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    heads: int, kv_heads: int, inner: int, size: int, reason: str, works: str
) -> None:
    config = config_of(heads, kv_heads)
    config.intermediate_size = inner
    with pytest.raises(UserError) as excinfo:
        check_tp_size(config, size)
    assert str(excinfo.value) == f"tp_size {size} does not divide this model: {reason}; sizes that work: {works}"


@pytest.mark.parametrize(("kv_heads", "size"), [(2, 4), (2, 8), (1, 16)])
def test_fewer_kv_heads_than_ranks_are_replicated(kv_heads: int, size: int) -> None:
    config = config_of(16, kv_heads, layers=1)
    config.intermediate_size = 48
    check_tp_size(config, size)
    starts = [
        pieces_of("model.layers.0.self_attn.qkv.bias", config, Shard(rank, size))[1].start for rank in range(size)
    ]
    assert starts == [4 * head for head in range(kv_heads) for _ in range(size // kv_heads)]


@pytest.mark.parametrize("layout", [{"version": 2, "tp_size": 2}, {"version": 1}, {"version": 1, "tp_size": True}, []])
def test_an_unknown_layout_is_refused(layout: object) -> None:
    config = config_of()
    config.npu_tuned_layout = layout
    with pytest.raises(CheckpointError, match="convert the plain checkpoint again"):
        converted_tp_size(config)


def test_a_name_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no parameter model\.layers\.0\.self_attn\.q_proj\.weight"):
        pieces_of("model.layers.0.self_attn.q_proj.weight", config_of())
    assert EMBEDDING in parameter_names(config_of())
