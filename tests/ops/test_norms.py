"""npu_rms_norm and npu_add_rms_norm: values, where they round, and what they refuse."""

from __future__ import annotations

import naive_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@settings(max_examples=25, deadline=None)
@given(lead=st.lists(st.integers(1, 3), min_size=1, max_size=2), norm=st.sampled_from([(8,), (4, 8)]), dtype=DTYPES)
def test_rms_norm_against_loops(lead, norm, dtype):
    torch.manual_seed(0)
    input, gamma = torch.randn(*lead, *norm).to(dtype), torch.randn(norm).to(dtype)
    expected, expected_rstd = naive_ops.rms_norm(input, gamma, 1e-5)
    for table, slack in ((ops, 1), (composed, 2)):
        out, rstd = table.npu_rms_norm(input, gamma, epsilon=1e-5)
        assert out.dtype == dtype
        assert rstd.dtype == torch.float32
        tolerance = slack * TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(rstd.double(), expected_rstd, atol=1e-5, rtol=1e-5)


def test_rms_norm_rounds_once_and_takes_a_float32_gamma():
    torch.manual_seed(0)
    input, gamma = torch.randn(64, 128).bfloat16(), torch.randn(128)
    once = (input.float() * torch.rsqrt(input.float().square().mean(-1, keepdim=True) + 1e-6) * gamma).bfloat16()
    out, _ = ops.npu_rms_norm(input, gamma)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, once, atol=0, rtol=0)
    assert composed.npu_rms_norm(input, gamma)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_add_rms_norm_matches_the_stock_norm_of_the_rounded_sum(dtype):
    torch.manual_seed(0)
    x1, x2, gamma = torch.randn(64, 128).to(dtype), torch.randn(64, 128).to(dtype), torch.randn(128).to(dtype)
    before = x1.clone(), x2.clone()
    stock = Qwen2RMSNorm(128, eps=1e-6).to(dtype)
    stock.weight.data.copy_(gamma)
    with torch.no_grad():
        expected = stock(x1 + x2)
    for table in (ops, composed):
        normed, rstd, residual = table.npu_add_rms_norm(x1, x2, gamma)
        torch.testing.assert_close(residual, x1 + x2, atol=0, rtol=0)
        torch.testing.assert_close(normed, expected, atol=0, rtol=1e-2 if dtype != torch.float32 else 1e-5)
        assert (normed == expected).float().mean() > 0.99 or dtype == torch.float32
        torch.testing.assert_close(rstd.double(), naive_ops.rms_norm(x1 + x2, gamma, 1e-6)[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((x1, x2), before, atol=0, rtol=0)


def test_add_rms_norm_is_not_bitwise_rms_norm_of_the_sum():
    torch.manual_seed(0)
    x1, x2, gamma = (torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16())
    fused, _, _ = ops.npu_add_rms_norm(x1, x2, gamma)
    assert not torch.equal(fused, ops.npu_rms_norm(x1 + x2, gamma)[0])


@pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
def test_refusals(table):
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gamma \(4,\) must equal the last dimensions of input \(2, 8\)"):
        table.npu_rms_norm(x, torch.ones(4))
    with pytest.raises(ValueError, match=r"gamma is torch\.float16"):
        table.npu_rms_norm(x, torch.ones(8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"gamma is torch\.float32; it must be torch\.bfloat16"):
        table.npu_add_rms_norm(x, x, torch.ones(8))
    with pytest.raises(ValueError, match="same shape and dtype"):
        table.npu_add_rms_norm(x, x.float(), torch.ones(8))
    with pytest.raises(ValueError, match=r"gamma \(2,\) must equal"):
        table.npu_add_rms_norm(x, x, torch.ones(2, dtype=torch.bfloat16))
