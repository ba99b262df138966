"""npu_apply_rotary_pos_emb and npu_rotary_mul: values against loops and the stock model, and refusals."""

from __future__ import annotations

import naive_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb as stock_rotary

from npu_tuned_model import ops
from npu_tuned_model.ops import ascend, composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def angles(batch: int, length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.rand(batch, length, 1, dim // 2) * 6
    turn = torch.cat((turn, turn), dim=-1)
    return turn.cos(), turn.sin()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    heads=st.sampled_from([(14, 2), (2, 2), (3, 1)]),
    dim=st.sampled_from([2, 6, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_apply_rotary_against_loops(sizes, heads, dim, dtype):
    torch.manual_seed(dim)
    query, key = torch.randn(*sizes, heads[0], dim).to(dtype), torch.randn(*sizes, heads[1], dim).to(dtype)
    cos, sin = (tensor.to(dtype) for tensor in angles(*sizes, dim))
    kept = query.clone(), key.clone()
    for table, slack in ((ops, 1), (composed, 3)):
        rotated = table.npu_apply_rotary_pos_emb(query, key, cos, sin)
        for out, tensor in zip(rotated, (query, key)):
            assert out.dtype == dtype
            tolerance = slack * TOLERANCE[dtype]
            torch.testing.assert_close(out.double(), naive_ops.rotate(tensor, cos, sin), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close((query, key), kept, atol=0, rtol=0)


def test_the_two_halves_of_cos_and_sin_may_differ():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 1, 8)
    cos, sin = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    out, _ = ops.npu_apply_rotary_pos_emb(query, key, cos, sin)
    torch.testing.assert_close(out.double(), naive_ops.rotate(query, cos, sin), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [64, 128])
@IMPLEMENTATIONS
def test_matches_the_stock_model(table, dim):
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 14, dim), torch.randn(2, 5, 2, dim)
    turn = torch.rand(5, dim // 2)
    cos, sin = torch.cat((turn, turn), -1).cos(), torch.cat((turn, turn), -1).sin()
    stock = stock_rotary(query.transpose(1, 2), key.transpose(1, 2), cos, sin, torch.arange(5).expand(2, 5))
    per_row = [tensor[None, :, None].expand(2, 5, 1, dim) for tensor in (cos, sin)]
    ours = table.npu_apply_rotary_pos_emb(query, key, *per_row)
    for out, expected in zip(ours, stock):
        torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-6, rtol=1e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(1, 1, 3, 64), (2, 1, 3, 64), (2, 4, 3, 64)])
def test_rotary_mul_broadcasts_and_casts_cos_and_sin(table, shape):
    torch.manual_seed(0)
    input = torch.randn(2, 4, 3, 64).bfloat16()
    cos, sin = torch.rand(shape), torch.rand(shape)
    out = table.npu_rotary_mul(input, cos, sin)
    assert out.dtype == torch.bfloat16
    expected = naive_ops.rotate(input, cos.bfloat16(), sin.bfloat16())
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)


@IMPLEMENTATIONS
def test_refusals_of_apply_rotary(table):
    query, key, cos = torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1, 64)
    apply = table.npu_apply_rotary_pos_emb
    for layout in ("BNSD", "BSH", "TND", "bsnd"):
        with pytest.raises(ValueError, match='only "BSND"'):
            apply(query, key, cos, cos, layout=layout)
    with pytest.raises(ValueError, match='"interleave" is not supported, only "half"'):
        apply(query, key, cos, cos, rotary_mode="interleave")
    with pytest.raises(ValueError, match=r"cos is \(1, 3, 1, 64\).*no broadcast over the batch"):
        apply(query, key, cos[:1], cos)
    with pytest.raises(ValueError, match=r"sin is \(2, 3, 1, 32\)"):
        apply(query, key, cos, cos[..., :32])
    with pytest.raises(ValueError, match="must have one dtype"):
        apply(query.bfloat16(), key.bfloat16(), cos, cos)
    with pytest.raises(ValueError, match="must have query's B, S and D"):
        apply(query, key[:, :2], cos, cos)
    with pytest.raises(ValueError, match="must be 4-D"):
        apply(query[0], key[0], cos, cos)
    with pytest.raises(ValueError, match="head dimension 7 is odd"):
        apply(query[..., :7], key[..., :7], cos[..., :7], cos[..., :7])


@IMPLEMENTATIONS
def test_refusals_of_rotary_mul(table):
    input, cos = torch.zeros(2, 4, 3, 64), torch.zeros(1, 1, 3, 64)
    with pytest.raises(ValueError, match='only "half"'):
        table.npu_rotary_mul(input, cos, cos, "interleave")
    with pytest.raises(ValueError, match="4-D with an even last dimension"):
        table.npu_rotary_mul(input[0], cos, cos)
    with pytest.raises(ValueError, match=r"r1 \(1, 1, 2, 64\) must be 4-D, full in D and broadcast"):
        table.npu_rotary_mul(input, cos[:, :, :2], cos)
    with pytest.raises(ValueError, match="must have the same shape"):
        table.npu_rotary_mul(input, cos, cos.expand(2, 1, 3, 64))


def test_an_npu_takes_head_dimension_64_or_128_only():
    query, key, cos = torch.zeros(1, 1, 2, 80), torch.zeros(1, 1, 1, 80), torch.zeros(1, 1, 1, 80)
    with pytest.raises(ValueError, match="head dimension 80 on an NPU; the kernel takes 64 or 128"):
        ascend.npu_apply_rotary_pos_emb(query, key, cos, cos, "BSND", "half")
