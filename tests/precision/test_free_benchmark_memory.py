"""Peak memory in the table of the regression is what torch has given out, and checks need little beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision import PrecisionDebugger
from precision.free_benchmark import baseline
from precision.free_benchmark.baseline_memory import peak_bytes

MIB = 1 << 20
CPU = torch.device("cpu")


def mebibytes(count: int) -> Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def one() -> None:
    mebibytes(64)


def one_after_the_other() -> None:
    for _ in range(3):
        mebibytes(64)


def two_at_once() -> None:
    first = mebibytes(64)
    assert mebibytes(32).numel() < first.numel()


def inside_an_operator() -> None:
    # logsumexp makes the exponentials before it adds them up
    torch.logsumexp(torch.zeros(16, MIB), 0)


@pytest.mark.parametrize(("work", "expected"), [(one, 64), (one_after_the_other, 64), (two_at_once, 96)])
def test_a_known_allocation_is_measured(work: Callable[[], None], expected: int) -> None:
    # the second time as well: the profiler's total goes on
    assert [peak_bytes(work, [], CPU) for _ in range(2)] == [expected * MIB] * 2


def test_what_an_operator_allocates_for_itself_counts() -> None:
    assert peak_bytes(inside_an_operator, [], CPU) >= 2 * 64 * MIB


def test_what_is_kept_or_given_back_does_not_disturb_the_next_measurement() -> None:
    kept: list[Tensor] = []
    assert peak_bytes(lambda: kept.append(mebibytes(64)), [], CPU) == 64 * MIB
    assert peak_bytes(one, [], CPU) == 64 * MIB
    assert peak_bytes(kept.clear, [], CPU) == 0
    assert peak_bytes(one, [], CPU) == 64 * MIB


def test_memory_that_is_held_counts_once() -> None:
    held = mebibytes(8)
    assert peak_bytes(one, [held, held[5:], held.view(2, -1)], CPU) == 72 * MIB


class Hungry:
    """A tool that keeps 64 MiB from its first step on."""

    summary = type("Nothing", (), {"checked": 0, "replaced": 0, "flagged": {}, "unchecked": {}})()

    def __init__(self, **options: Any) -> None:
        self.kept: list[Tensor] = []

    def start(self, model: nn.Module) -> Hungry:
        self.kept = self.kept or [mebibytes(64)]
        return self

    def __enter__(self) -> Hungry:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self) -> None:
        pass


def test_the_table_counts_what_a_tool_makes_once_and_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "PrecisionDebugger", Hungry)
    model = nn.Linear(4096, 4096, bias=False).eval()
    row = baseline.measure("linear", model, {"input": torch.zeros(1, 4096)}, "any", {}, 1, "ours")
    # 64 MiB of weights, and as much again
    assert 1.99 < row.memory < 2.01


@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu", "round_mode", "condition"])
def test_no_mode_holds_a_wider_copy_of_a_large_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("precision.free_benchmark.pieces.PIECE", 1 << 16)
    x, weight = torch.randn(8, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    tool = PrecisionDebugger(dump_path=tmp_path, task="free_benchmark", quiet=True, list=["linear"], pert_mode=mode)

    def step() -> None:
        with torch.no_grad(), tool.start():
            F.linear(x, weight)
        tool.step()

    # the first step makes the tables of random numbers
    step()
    assert peak_bytes(step, [], CPU) < weight.nbytes
    assert sum(tool.summary.flagged.values()) == 0


@pytest.mark.parametrize("direction", ["trunc", "ceil"])
def test_a_rounding_direction_is_named_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    from precision.free_benchmark.rounding import round_to

    class Kernels:
        @staticmethod
        def linear(x: Tensor, weight: Tensor) -> Tensor:
            product = F.linear(x.float(), weight.float())
            return round_to(product, x.dtype, direction) if x.dtype == torch.bfloat16 else product

    monkeypatch.setattr("precision.free_benchmark.pieces.PIECE", 1 << 10)
    kernels = Kernels()
    tool = PrecisionDebugger(
        dump_path=tmp_path, task="free_benchmark", quiet=True, list=["linear"], pert_mode="round_mode"
    )
    tool.register_api(kernels, ["linear"])
    with torch.no_grad(), tool.start():
        kernels.linear(torch.randn(32, 64).bfloat16(), torch.randn(128, 64).bfloat16())
    assert f"rounded by {direction}" in (tmp_path / "step0/rank/free_benchmark_calls.csv").read_text()
