"""npu_mm_all_reduce_base: alone a matmul, with a process group the sum over its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])


@IMPLEMENTATIONS
@pytest.mark.parametrize("transposed", [False, True])
def test_alone_it_is_a_linear_layer_with_residual(table, transposed):
    torch.manual_seed(0)
    x1, x3, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(4)
    x2 = torch.randn(4, 8).t() if transposed else torch.randn(8, 4)
    out = table.npu_mm_all_reduce_base(x1, x2, "group", bias=bias, x3=x3)
    expected = x1.double() @ x2.double() + bias.double() + x3.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def _rank(rank: int, meeting_point: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 8), torch.randn(8, 4), torch.randn(4)
    part = slice(4 * rank, 4 * rank + 4)
    results = [
        table.npu_mm_all_reduce_base(x[:, part], weight[part], "group", bias=bias if rank == 0 else None)
        for table in (ops, composed)
    ]
    torch.save((results, x @ weight + bias), f"{out}.{rank}")
    dist.destroy_process_group()


def test_two_ranks_sum_their_halves(tmp_path: Path):
    multiprocessing.spawn(_rank, args=(str(tmp_path / "meet"), str(tmp_path / "out")), nprocs=2)
    for rank in range(2):
        results, expected = torch.load(tmp_path / f"out.{rank}")
        for result in results:
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((torch.zeros(3, 8), torch.zeros(4, 8)), {}, "must be .*K, N"),
        ((torch.zeros(8), torch.zeros(8, 4)), {}, r"x1 \(8,\) must be \(M, K\) or \(B, S, K\)"),
        ((torch.zeros(3, 8), torch.zeros(8, 4).half()), {}, "same floating-point dtype"),
        ((torch.zeros(3, 8), torch.zeros(8, 4)), {"bias": torch.zeros(3)}, r"bias \(3,\) must be \(N,\) = \(4,\)"),
        ((torch.zeros(3, 8), torch.zeros(8, 4)), {"x3": torch.zeros(4)}, "x3 .* shape of the result"),
        ((torch.zeros(3, 8), torch.zeros(8, 4)), {"reduce_op": "max"}, 'only "sum"'),
    ],
)
def test_refusals(table, arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        table.npu_mm_all_reduce_base(*arguments, "group", **keywords)
