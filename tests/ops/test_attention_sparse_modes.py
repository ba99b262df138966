"""Which positions a query row sees: sparse modes, masks, and limits, for both implementations."""

from __future__ import annotations

import math

import naive_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

UNLIMITED = 2147483647
HIDES_LAST_OF_FIRST = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
COMPRESSED = "compressed"
IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])


def positions_seen(table: object, op: str, rows: int, slots: int, **arguments: object) -> str:
    """Rows of 1 and . as the op sees them: each value slot is its own unit vector, all scores are equal."""
    query = torch.zeros(1, rows, 1, slots)
    key = torch.zeros(1, slots, 1, slots)
    value = torch.eye(slots).view(1, slots, 1, slots)
    if arguments.get("atten_mask") is COMPRESSED:
        arguments["atten_mask"] = ops.compressed_causal_mask("cpu")
    scale = {"scale_value": 1.0} if op == "npu_prompt_flash_attention" else {"scale": 1.0}
    out = getattr(table, op)(query, key, value, num_heads=1, input_layout="BSND", **scale, **arguments)
    out = out if isinstance(out, Tensor) else out[0]
    return " / ".join("".join("1" if seen > 0 else "." for seen in row) for row in out[0, :, 0].tolist())


# The worked examples of the operator reference, 15.1.
ALLOWED = [
    (2, 5, {"sparse_mode": 0, "next_tokens": 0}, "11111 / 11111"),
    (2, 5, {"sparse_mode": 0, "atten_mask": HIDES_LAST_OF_FIRST, "next_tokens": 0}, "1.... / 11..."),
    (2, 5, {"sparse_mode": 0, "atten_mask": HIDES_LAST_OF_FIRST, "next_tokens": UNLIMITED}, "1111. / 11111"),
    (2, 5, {"sparse_mode": 2, "atten_mask": COMPRESSED}, "1.... / 11..."),
    (2, 5, {"sparse_mode": 3, "atten_mask": COMPRESSED}, "1111. / 11111"),
    (2, 5, {"sparse_mode": 4, "atten_mask": COMPRESSED, "pre_tokens": 1, "next_tokens": 0}, "..11. / ...11"),
    (4, 2, {"sparse_mode": 3, "atten_mask": COMPRESSED}, ".. / .. / 1. / 11"),
    # Mode 1 looks at the mask alone; mode 3 equals mode 2 when Sq == Skv.
    (2, 5, {"sparse_mode": 1, "atten_mask": HIDES_LAST_OF_FIRST, "next_tokens": 0}, "1111. / 11111"),
    (3, 3, {"sparse_mode": 2, "atten_mask": COMPRESSED}, "1.. / 11. / 111"),
    (3, 3, {"sparse_mode": 3, "atten_mask": COMPRESSED}, "1.. / 11. / 111"),
]


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["npu_prompt_flash_attention", "npu_fused_infer_attention_score"])
@pytest.mark.parametrize(("rows", "slots", "arguments", "expected"), ALLOWED)
def test_allowed_positions(table, op, rows, slots, arguments, expected):
    assert positions_seen(table, op, rows, slots, **dict(arguments)) == expected


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["npu_prompt_flash_attention", "npu_fused_infer_attention_score"])
def test_next_tokens_cuts_nothing_unless_asked(table, op):
    assert positions_seen(table, op, 2, 5, atten_mask=HIDES_LAST_OF_FIRST) == "1111. / 11111"


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(2, 5), (1, 2, 5), (1, 1, 2, 5)])
def test_true_or_one_is_masked_out_in_every_mask_dtype_and_shape(table, dtype, shape):
    mask = HIDES_LAST_OF_FIRST.to(dtype).view(shape)
    assert positions_seen(table, "npu_fused_infer_attention_score", 2, 5, atten_mask=mask) == "1111. / 11111"


@IMPLEMENTATIONS
def test_mask_columns_may_be_padded_to_32(table):
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[:, :5] = HIDES_LAST_OF_FIRST
    assert positions_seen(table, "npu_prompt_flash_attention", 2, 5, atten_mask=mask) == "1111. / 11111"


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 3, 4)])
def test_each_row_of_the_batch_has_its_own_mask(table, shape):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 2, 4), torch.randn(2, 4, 2, 4), torch.randn(2, 4, 2, 4)
    mask = torch.tensor([[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]], [[1, 0, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]])
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.5, lambda b, i, j: not mask[b, i, j])
    actual = table.npu_prompt_flash_attention(
        query, key, value, scale_value=0.5, num_heads=2, input_layout="BSND", atten_mask=mask.bool().view(shape)
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_compressed_mask_is_the_upper_triangle_and_kept_per_device():
    mask = ops.compressed_causal_mask("cpu")
    assert mask.shape == (2048, 2048)
    assert mask.dtype == torch.bool
    assert not mask[5, 5]
    assert mask[5, 6]
    assert not mask[6, 5]
    assert ops.compressed_causal_mask(torch.device("cpu")) is mask


def test_compressed_mask_of_an_export_is_not_kept():
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        ops.compressed_causal_mask(torch.device("cpu", 7))
    assert type(ops.compressed_causal_mask(torch.device("cpu", 7))) is Tensor


@settings(max_examples=25, deadline=None)
@given(
    mode=st.integers(0, 4),
    sizes=st.tuples(st.integers(1, 2), st.integers(2, 5), st.integers(1, 6)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    limits=st.tuples(st.integers(0, 3) | st.just(UNLIMITED), st.integers(0, 3) | st.just(UNLIMITED)),
    with_mask=st.booleans(),
    data=st.data(),
)
def test_three_implementations_agree(mode, sizes, heads, limits, with_mask, data):
    batch, rows, slots = sizes
    n, kvn = heads
    torch.manual_seed(mode + rows)
    query, key, value = (
        torch.randn(batch, rows, n, 8),
        torch.randn(batch, slots, kvn, 8),
        torch.randn(batch, slots, kvn, 8),
    )
    query_lengths = data.draw(st.none() | st.lists(st.integers(1, rows), min_size=batch, max_size=batch))
    kv_lengths = data.draw(st.none() | st.lists(st.integers(0, slots), min_size=batch, max_size=batch))
    full = torch.rand(rows, slots) < 0.3
    before, after = limits
    mask = None
    if mode >= 2:
        mask = ops.compressed_causal_mask("cpu")
    elif mode == 1 or with_mask:
        mask = full
    scale = 1 / math.sqrt(8)

    def seen(b: int, i: int, j: int) -> bool:
        valid_rows = rows if query_lengths is None else query_lengths[b]
        valid_slots = slots if kv_lengths is None else kv_lengths[b]
        if i >= valid_rows or j >= valid_slots:
            return False
        used = full if mode < 2 and mask is not None else None
        return naive_ops.visible(mode, valid_rows, valid_slots, mask=used, before=before, after=after)[i][j]

    expected, expected_lse = naive_ops.attention_bsnd(query, key, value, scale, seen)
    arguments = dict(
        scale=scale,
        num_heads=n,
        num_key_value_heads=kvn,
        input_layout="BSND",
        atten_mask=mask,
        sparse_mode=mode,
        pre_tokens=before,
        next_tokens=after,
        actual_seq_lengths=query_lengths,
        actual_seq_lengths_kv=kv_lengths,
    )
    for table in (ops, composed):
        actual, lse = table.npu_fused_infer_attention_score(query, key, value, **arguments, softmax_lse_flag=True)
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-4)
        without_lse, empty = table.npu_fused_infer_attention_score(query, key, value, **arguments)
        torch.testing.assert_close(without_lse.double(), expected, atol=1e-5, rtol=1e-4)
        assert empty.shape == (0,)
