"""npu_swiglu: the first half is the gate; one rounding; no odd dimension."""

from __future__ import annotations

import naive_ops
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_first_half_is_the_gate(shape, dtype, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    torch.manual_seed(sum(shape))
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    pairs = zip(gate.double().flatten().tolist(), up.double().flatten().tolist())
    expected = torch.tensor([naive_ops.swiglu(g, u) for g, u in pairs], dtype=torch.float64).view(shape)
    for table, slack in ((ops, 1), (composed, 2)):
        out = table.npu_swiglu(torch.cat((gate, up), dim), dim)
        assert out.dtype == dtype
        tolerance = slack * TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_rounds_once_where_the_small_ops_round_twice():
    torch.manual_seed(0)
    gate, up = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
    both = torch.cat((gate, up))
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    torch.testing.assert_close(ops.npu_swiglu(both), once, atol=0, rtol=0)
    assert not torch.equal(composed.npu_swiglu(both), once)


@pytest.mark.parametrize(
    ("shape", "dim"), [((600, 1000), -1), ((600, 1001), 0), ((3, 200, 1000), 1), ((1, 2**20), 1), ((2**20,), 0)]
)
def test_large_inputs_go_block_by_block(shape, dim):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    gate, up = values.detach().chunk(2, dim)
    out = ops.npu_swiglu(values, dim)
    assert torch.equal(out, (F.silu(gate.float()) * up.float()).bfloat16())
    assert out.is_contiguous()
    out.backward(torch.ones_like(out))
    assert values.grad is not None
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
def test_refusals(table):
    with pytest.raises(ValueError, match=r"dimension -1 of input \(2, 3, 15\) is odd"):
        table.npu_swiglu(torch.zeros(2, 3, 15))
    with pytest.raises(ValueError, match="dim 3 is out of range for an input of rank 3"):
        table.npu_swiglu(torch.zeros(2, 3, 16), 3)
