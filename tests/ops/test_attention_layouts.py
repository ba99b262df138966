"""Layouts, head groups and dtypes: the same numbers whatever the arrangement."""

from __future__ import annotations

import math

import naive_ops
import pytest
import torch
from torch import Tensor

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
TIGHT = {"atol": 1e-5, "rtol": 1e-4}
BATCH, ROWS, HEADS, KV_HEADS, DIM = 2, 3, 4, 2, 8

FROM_BSND = {
    "BSH": lambda tensor: tensor.flatten(2),
    "BSND": lambda tensor: tensor,
    "BNSD": lambda tensor: tensor.transpose(1, 2),
    "NBSD": lambda tensor: tensor.permute(2, 0, 1, 3),
}


def random_qkv(rows: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(BATCH, rows, HEADS, DIM),
        torch.randn(BATCH, slots, KV_HEADS, DIM),
        torch.randn(BATCH, slots, KV_HEADS, DIM),
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(
    "layout",
    ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"],
)
def test_every_layout_of_fia_gives_the_same_numbers(table, layout, rows):
    query, key, value = random_qkv(rows, 5)
    expected, expected_lse = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: True)
    source, target = layout.split("_")[0], layout.split("_")[-1]
    out, lse = table.npu_fused_infer_attention_score(
        *(FROM_BSND[source](tensor) for tensor in (query, key, value)),
        scale=0.3,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout=layout,
        softmax_lse_flag=True,
    )
    torch.testing.assert_close(out.double(), FROM_BSND[target](expected), **TIGHT)
    torch.testing.assert_close(lse.double(), expected_lse, **TIGHT)
    assert out.is_contiguous()


@IMPLEMENTATIONS
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("mode", [2, 3])
def test_causal_prefill_in_every_layout_of_pfa(table, layout, mode):
    query, key, value = random_qkv(ROWS, ROWS)
    expected, _ = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: j <= i)
    source, target = layout.split("_")[0], layout.split("_")[-1]
    out = table.npu_prompt_flash_attention(
        *(FROM_BSND[source](tensor) for tensor in (query, key, value)),
        scale_value=0.3,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout=layout,
        atten_mask=ops.compressed_causal_mask("cpu"),
        sparse_mode=mode,
    )
    torch.testing.assert_close(out.double(), FROM_BSND[target](expected), **TIGHT)


@IMPLEMENTATIONS
def test_packed_prompt_attention_with_a_value_of_its_own_size(table):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 12), torch.randn(5, 2, 12), torch.randn(5, 2, 8)
    out = table.npu_prompt_flash_attention(
        query,
        key,
        value,
        scale_value=0.3,
        num_heads=2,
        input_layout="TND",
        actual_seq_lengths=[1, 3],
        actual_seq_lengths_kv=[2, 5],
    )
    first, _ = naive_ops.attention_bsnd(query[None, :1], key[None, :2], value[None, :2], 0.3, lambda b, i, j: True)
    second, _ = naive_ops.attention_bsnd(query[None, 1:], key[None, 2:], value[None, 2:], 0.3, lambda b, i, j: True)
    torch.testing.assert_close(out.double(), torch.cat([first[0], second[0]]), **TIGHT)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (28, 4, 128), (12, 2, 128)])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_groups_of_the_qwen2_family(heads, kv_heads, dim, rows, dtype):
    torch.manual_seed(0)
    shapes = ((2, rows, heads * dim), (2, 9, kv_heads * dim), (2, 9, kv_heads * dim))
    query, key, value = (torch.randn(shape).to(dtype) for shape in shapes)
    arguments = dict(
        scale=1 / math.sqrt(dim),
        num_heads=heads,
        num_key_value_heads=kv_heads,
        input_layout="BSH",
        actual_seq_lengths_kv=[9, 6],
    )
    portable, _ = ops.npu_fused_infer_attention_score(query, key, value, **arguments)
    small_ops, _ = composed.npu_fused_infer_attention_score(query, key, value, **arguments)
    exact, _ = composed.npu_fused_infer_attention_score(query.double(), key.double(), value.double(), **arguments)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(portable.double(), exact, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(small_ops.double(), exact, atol=2 * tolerance, rtol=2 * tolerance)


def test_query_heads_share_kv_heads_in_consecutive_groups():
    value = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 1, 2, 8)
    out = ops.npu_incre_flash_attention(
        torch.zeros(1, 1, 4, 8),
        torch.zeros(1, 1, 2, 8),
        value,
        scale_value=1.0,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
    )
    assert out[0, 0, :, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


@IMPLEMENTATIONS
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("bias_batch", [1, BATCH])
def test_position_bias_is_added_to_the_scaled_scores(table, rows, bias_batch):
    query, key, value = random_qkv(rows, 5)
    bias = torch.randn(bias_batch, HEADS, rows, 5)
    expected, expected_lse = naive_ops.attention_bsnd(query, key, value, 0.3, lambda b, i, j: j < 4, bias)
    out, lse = table.npu_fused_infer_attention_score(
        query,
        key,
        value,
        scale=0.3,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="BSND",
        pse_shift=bias,
        actual_seq_lengths_kv=[4],
        softmax_lse_flag=True,
    )
    torch.testing.assert_close(out.double(), expected, **TIGHT)
    torch.testing.assert_close(lse.double(), expected_lse, **TIGHT)


@IMPLEMENTATIONS
def test_int8_output_rounds_half_to_even_and_saturates(table):
    value = torch.tensor([0.5, 1.5, -2.5, 100.0, -100.0, 1.0, 0.0, 3.0]).view(1, 1, 1, 8)
    common = {"num_heads": 1, "input_layout": "BSND", "scale_value": 1.0}
    out = table.npu_incre_flash_attention(
        torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), value, quant_scale2=torch.tensor([2.0]), **common
    )
    assert out.dtype == torch.int8
    assert out.flatten().tolist() == [1, 3, -5, 127, -128, 2, 0, 6]
    shifted = table.npu_incre_flash_attention(
        torch.zeros(1, 1, 1, 8),
        torch.zeros(1, 1, 1, 8),
        value,
        quant_scale2=torch.tensor([1.0]),
        quant_offset2=torch.tensor([1.0]),
        **common,
    )
    assert shifted.flatten().tolist() == [2, 2, -2, 101, -99, 2, 1, 4]
