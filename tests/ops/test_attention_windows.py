"""Which KV slots count: lengths, left padding, pages, packed sequences."""

from __future__ import annotations

import math

import naive_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
TIGHT = {"atol": 1e-5, "rtol": 1e-4}


def window(table: object, op: str, rows: int, padding: int | None, length: int, slots: int = 10) -> list[int]:
    """The slots that get weight, when all scores are equal and each value slot is its own unit vector."""
    query, key = torch.zeros(1, rows, 1, slots), torch.zeros(1, slots, 1, slots)
    value = torch.eye(slots).view(1, slots, 1, slots)
    arguments = {"num_heads": 1, "input_layout": "BSND"}
    if padding is not None:
        arguments["kv_padding_size"] = torch.tensor([padding])
    if op == "npu_incre_flash_attention":
        out = table.npu_incre_flash_attention(
            query, key, value, scale_value=1.0, actual_seq_lengths=[length], **arguments
        )
    else:
        out, _ = table.npu_fused_infer_attention_score(
            query, key, value, scale=1.0, actual_seq_lengths_kv=[length], **arguments
        )
    return [slot for slot, weight in enumerate(out[0, 0, 0].tolist()) if weight > 0]


# The worked examples of the operator reference, 15.3: Skv = 10.
WINDOWS = [
    (3, 4, range(3, 7)),
    (3, 7, range(0, 7)),
    (3, 8, range(0, 0)),
    (0, 10, range(0, 10)),
    (-2, 4, range(6, 10)),
    (None, 4, range(0, 4)),
    (0, 4, range(6, 10)),
]


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["npu_incre_flash_attention", "npu_fused_infer_attention_score"])
@pytest.mark.parametrize(("padding", "length", "expected"), WINDOWS)
def test_kv_window_of_decode(table, op, padding, length, expected):
    assert window(table, op, 1, padding, length) == list(expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("padding", "length", "expected"), [row for row in WINDOWS if len(row[2])])
def test_kv_window_of_prefill(table, padding, length, expected):
    assert window(table, "npu_fused_infer_attention_score", 2, padding, length) == list(expected)


@IMPLEMENTATIONS
def test_an_empty_kv_gives_zeros(table):
    empty = torch.zeros(1, 0, 1, 8)
    out = table.npu_prompt_flash_attention(
        torch.ones(1, 3, 1, 8), empty, empty, scale_value=1.0, num_heads=1, input_layout="BSND"
    )
    torch.testing.assert_close(out, torch.zeros(1, 3, 1, 8), atol=0, rtol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [[3, 0], torch.tensor([3, 0])], ids=["list", "tensor"])
def test_decode_lengths_as_list_and_tensor_and_a_length_of_zero(table, lengths):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 1, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: j < (3, 0)[b])
    out = table.npu_incre_flash_attention(
        query,
        key,
        value,
        scale_value=0.3,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
        actual_seq_lengths=lengths,
    )
    torch.testing.assert_close(out.double(), expected, **TIGHT)


@IMPLEMENTATIONS
def test_one_length_serves_all_rows_and_surplus_lengths_are_dropped(table):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 1, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    common = {"scale_value": 0.3, "num_heads": 2, "input_layout": "BSND"}
    shared = table.npu_incre_flash_attention(query, key, value, actual_seq_lengths=[4], **common)
    each = table.npu_incre_flash_attention(query, key, value, actual_seq_lengths=[4, 4, 1], **common)
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: j < 4)
    torch.testing.assert_close(shared.double(), expected, **TIGHT)
    torch.testing.assert_close(each.double(), expected, **TIGHT)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (2, 1, 1, 5)])
@pytest.mark.parametrize("op", ["npu_incre_flash_attention", "npu_fused_infer_attention_score"])
def test_decode_mask_hides_absolute_slots(table, op, shape):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 1, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 0, 1, 0]])
    scale = "scale" if op == "npu_fused_infer_attention_score" else "scale_value"
    out = getattr(table, op)(
        query,
        key,
        value,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
        atten_mask=mask.bool().view(shape),
        **{scale: 0.3},
    )
    out = out[0] if isinstance(out, tuple) else out
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: not mask[b, j])
    torch.testing.assert_close(out.double(), expected, **TIGHT)


@IMPLEMENTATIONS
def test_fused_decode_ignores_sparse_mode_and_query_lengths_as_the_vendor_does(table):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 2, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: True)
    for mode in (2, 3, 4):
        out, _ = table.npu_fused_infer_attention_score(
            query,
            key,
            value,
            scale=0.3,
            num_heads=2,
            input_layout="BSND",
            atten_mask=ops.compressed_causal_mask("cpu"),
            sparse_mode=mode,
            pre_tokens=0,
            next_tokens=0,
            actual_seq_lengths=[0],
        )
        torch.testing.assert_close(out.double(), expected, **TIGHT)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    past=st.integers(0, 2),
    padding=st.tuples(st.integers(-1, 2), st.integers(-1, 2)),
    tensor_lengths=st.booleans(),
)
def test_left_padded_prefill_with_both_paddings(lengths, past, padding, tensor_lengths):
    torch.manual_seed(sum(lengths))
    batch, kv_lengths = len(lengths), [length + past for length in lengths]
    rows, slots = max(lengths) + max(padding[0], 0), max(kv_lengths) + max(padding[1], 0)
    if rows == 1:
        rows = 2
    query, key, value = torch.randn(batch, rows, 2, 8), torch.randn(batch, slots, 1, 8), torch.randn(batch, slots, 1, 8)

    def seen(b: int, i: int, j: int) -> bool:
        row = i - (rows - max(padding[0], 0) - lengths[b])
        slot = j - (slots - max(padding[1], 0) - kv_lengths[b])
        inside = 0 <= row < lengths[b] and 0 <= slot < kv_lengths[b]
        return inside and slot <= row + past

    expected, expected_lse = naive_ops.attention_bsnd(query, key, value, 0.3, seen)
    for table in (ops, composed):
        out, lse = table.npu_fused_infer_attention_score(
            query,
            key,
            value,
            scale=0.3,
            num_heads=2,
            num_key_value_heads=1,
            input_layout="BSND",
            atten_mask=ops.compressed_causal_mask("cpu"),
            sparse_mode=3,
            actual_seq_lengths=torch.tensor(lengths) if tensor_lengths else lengths,
            actual_seq_lengths_kv=torch.tensor(kv_lengths) if tensor_lengths else kv_lengths,
            query_padding_size=torch.tensor([padding[0]]),
            kv_padding_size=torch.tensor(padding[1]),
            softmax_lse_flag=True,
        )
        torch.testing.assert_close(out.double(), expected, **TIGHT)
        torch.testing.assert_close(lse.double(), expected_lse, **TIGHT)


def paged(cache_bsnd: torch.Tensor, lengths: list[int], size: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in random order, with the block table; entries of unused blocks point outside the cache."""
    batch, slots, kv_heads, head_dim = cache_bsnd.shape
    per_row = slots // size
    order = torch.randperm(batch * per_row, generator=torch.Generator().manual_seed(0)).view(batch, per_row)
    blocks = torch.zeros(batch * per_row, size, kv_heads, head_dim)
    table = torch.full((batch, per_row), 10**6, dtype=torch.int32)
    for b in range(batch):
        for index in range(-(-lengths[b] // size)):
            blocks[order[b, index]] = cache_bsnd[b, index * size : (index + 1) * size]
            table[b, index] = order[b, index]
    if form == "flat":
        return blocks.flatten(2), table
    return blocks.transpose(1, 2).contiguous(), table


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["flat", "heads"])
@pytest.mark.parametrize("op", ["npu_incre_flash_attention", "npu_fused_infer_attention_score"])
def test_paged_decode_equals_contiguous(table, op, form):
    torch.manual_seed(0)
    lengths = [17, 48, 3]
    query = torch.randn(3, 4, 1, 8)
    key, value = torch.randn(3, 48, 2, 8), torch.randn(3, 48, 2, 8)
    keys, blocks = paged(key, lengths, 16, form)
    values, _ = paged(value, lengths, 16, form)
    scale = "scale" if op == "npu_fused_infer_attention_score" else "scale_value"
    kv_lengths = "actual_seq_lengths" if op == "npu_incre_flash_attention" else "actual_seq_lengths_kv"
    out = getattr(table, op)(
        query,
        keys,
        values,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BNSD",
        block_table=blocks,
        block_size=16,
        **{scale: 0.3, kv_lengths: lengths},
    )
    out = out[0] if isinstance(out, tuple) else out
    expected, _ = naive_ops.attention_bsnd(query.transpose(1, 2), key, value, 0.3, lambda b, i, j: j < lengths[b])
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **TIGHT)


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["flat", "heads"])
def test_paged_chunk_of_a_prefill(table, form):
    torch.manual_seed(0)
    lengths, rows = [130, 4], 3
    query = torch.randn(2, 2, rows, 8)
    key, value = torch.randn(2, 256, 1, 8), torch.randn(2, 256, 1, 8)
    keys, blocks = paged(key, lengths, 128, form)
    values, _ = paged(value, lengths, 128, form)
    out, _ = table.npu_fused_infer_attention_score(
        query,
        keys,
        values,
        scale=0.3,
        num_heads=2,
        num_key_value_heads=1,
        input_layout="BNSD",
        block_table=blocks,
        block_size=128,
        actual_seq_lengths_kv=lengths,
        atten_mask=ops.compressed_causal_mask("cpu"),
        sparse_mode=3,
    )
    expected, _ = naive_ops.attention_bsnd(
        query.transpose(1, 2), key, value, 0.3, lambda b, i, j: j <= i + lengths[b] - rows
    )
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, **TIGHT)


def packed_reference(query, key, value, query_lengths, kv_lengths, mode):
    """(T, N, D) and (T, N, 1) of sequences that lie end to end, each computed alone."""
    outs, lses, row, slot = [], [], 0, 0
    for rows, slots in zip(query_lengths, kv_lengths):
        part = (query[row : row + rows], key[slot : slot + slots], value[slot : slot + slots])
        out, lse = naive_ops.attention_bsnd(
            *(tensor.unsqueeze(0) for tensor in part),
            0.3,
            lambda b, i, j, n=rows, m=slots: naive_ops.visible(mode, n, m)[i][j],
        )
        outs.append(out[0])
        lses.append(lse[0].transpose(0, 1))
        row, slot = row + rows, slot + slots
    return torch.cat(outs), torch.cat(lses)


def cumulative(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3),
    mode=st.sampled_from([0, 3]),
    layout=st.sampled_from(["TND", "NTD", "TND_NTD", "NTD_TND"]),
)
def test_packed_sequences_do_not_see_each_other(pairs, mode, layout):
    torch.manual_seed(len(pairs))
    query_lengths, kv_lengths = [rows for rows, _ in pairs], [rows + past for rows, past in pairs]
    query = torch.randn(sum(query_lengths), 4, 8)
    key, value = torch.randn(sum(kv_lengths), 2, 8), torch.randn(sum(kv_lengths), 2, 8)
    expected, expected_lse = packed_reference(query, key, value, query_lengths, kv_lengths, mode)
    arguments = dict(
        scale=0.3,
        num_heads=4,
        num_key_value_heads=2,
        input_layout=layout,
        atten_mask=ops.compressed_causal_mask("cpu") if mode else None,
        sparse_mode=mode,
        softmax_lse_flag=True,
    )
    if layout.startswith("NTD"):
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    ends, kv_ends = cumulative(query_lengths), cumulative(kv_lengths)
    for table, given_ends, given_kv_ends in (
        (ops, ends, kv_ends),
        (ops, torch.tensor(ends), torch.tensor(kv_ends)),
        (composed, ends, kv_ends),
    ):
        out, lse = table.npu_fused_infer_attention_score(
            query, key, value, actual_seq_lengths=given_ends, actual_seq_lengths_kv=given_kv_ends, **arguments
        )
        out = out.transpose(0, 1) if layout.endswith("NTD") else out
        torch.testing.assert_close(out.double(), expected, **TIGHT)
        torch.testing.assert_close(lse.double(), expected_lse, **TIGHT)


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["flat", "heads"])
def test_packed_queries_on_pages_take_plain_kv_lengths(table, form):
    torch.manual_seed(0)
    query_lengths, kv_lengths = [2, 1, 3], [18, 5, 3]
    query = torch.randn(6, 4, 8)
    key, value = torch.randn(3, 32, 2, 8), torch.randn(3, 32, 2, 8)
    keys, blocks = paged(key, kv_lengths, 16, form)
    values, _ = paged(value, kv_lengths, 16, form)
    flat_key, flat_value = (
        torch.cat([cache[b, :length] for b, length in enumerate(kv_lengths)]) for cache in (key, value)
    )
    expected, _ = packed_reference(query, flat_key, flat_value, query_lengths, kv_lengths, 3)
    out, _ = table.npu_fused_infer_attention_score(
        query,
        keys,
        values,
        scale=0.3,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="TND",
        block_table=blocks,
        block_size=16,
        actual_seq_lengths=cumulative(query_lengths),
        actual_seq_lengths_kv=kv_lengths,
        atten_mask=ops.compressed_causal_mask("cpu"),
        sparse_mode=3,
    )
    torch.testing.assert_close(out.double(), expected, **TIGHT)


def test_log_sum_exp_merges_two_halves_of_the_kv():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    common = {"scale": 1 / math.sqrt(8), "num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
    whole, whole_lse = ops.npu_fused_infer_attention_score(query, key, value, softmax_lse_flag=True, **common)
    halves = [
        ops.npu_fused_infer_attention_score(query, key[:, part], value[:, part], softmax_lse_flag=True, **common)
        for part in (slice(0, 2), slice(2, 6))
    ]
    lses = torch.stack([lse for _, lse in halves])
    weights = torch.softmax(lses, dim=0).transpose(2, 3)
    merged = sum(weight * out for weight, (out, _) in zip(weights, halves))
    torch.testing.assert_close(merged, whole, **TIGHT)
    torch.testing.assert_close(torch.logsumexp(lses, dim=0), whole_lse, **TIGHT)
