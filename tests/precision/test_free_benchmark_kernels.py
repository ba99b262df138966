"""Small operators of known conditioning: each mode flags what it should and nothing else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from precision import PrecisionDebugger
from precision.free_benchmark import limits
from precision.free_benchmark.config import PERT_MODES
from precision.free_benchmark.distance import distance

NOISY = {"add_noise", "bit_noise", "change_value"}


class Kernels:
    """Operators by name, called through the attributes as a model calls its operator table."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    folder: Path, functions: dict[str, Callable[..., Any]], run: Callable[[Kernels], Any], **options: Any
) -> list[dict[str, str]]:
    """The rows of every call that was looked at."""
    kernels = Kernels(**functions)
    tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", quiet=True, list=list(functions), **options)
    tool.register_api(kernels, list(functions))
    with tool.start():
        run(kernels)
    with open(folder / "step0/rank/free_benchmark_calls.csv") as file:
        return list(csv.DictReader(file))


def verdicts(rows: list[dict[str, str]]) -> set[str]:
    return {row["verdict"] for row in rows}


def cancelling_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def large_logits(x: Tensor) -> Tensor:
    return x.softmax(-1)


def stable_variance(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def textbook_variance(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def logits(dtype: torch.dtype, spread: float) -> Tensor:
    """Around 1000, the first of them the largest of its row."""
    x = 1000 + spread * normal(4, 64, dtype=dtype)
    x[0, 0] += 5 * spread
    return x


def cancelling(dtype: torch.dtype) -> Tensor:
    """Rows of about 1 each that add up to about 1/1000."""
    x = normal(4, 512, dtype=dtype)
    for _ in range(2):
        x = torch.cat([x, -x.double().sum(-1, keepdim=True).to(dtype)], dim=-1)
    return torch.cat([x, torch.full((4, 1), 1e-3, dtype=dtype)], dim=-1)


ILL_CONDITIONED = {
    "cancelling_sum": (cancelling_sum, cancelling(torch.float32)),
    "cancelling_sum_bfloat16": (cancelling_sum, cancelling(torch.bfloat16)),
    "large_logits": (large_logits, logits(torch.float32, 1.0)),
    "large_logits_bfloat16": (large_logits, logits(torch.bfloat16, 8.0)),
}
WELL_CONDITIONED = {
    "softmax": (large_logits, normal(4, 64, dtype=torch.bfloat16)),
    "variance": (stable_variance, normal(4, 512)),
    "matmul": (lambda x: x @ x.mT, normal(8, 256, dtype=torch.bfloat16)),
    "norm": (lambda x: F.layer_norm(x, (64,)), normal(8, 64, dtype=torch.float16)),
    "gelu": (F.gelu, normal(8, 64, dtype=torch.bfloat16)),
    "masked_softmax": (
        lambda x: x.softmax(-1),
        normal(16, 16, dtype=torch.bfloat16) + torch.full((16, 16), torch.finfo(torch.bfloat16).min).triu(1).bfloat16(),
    ),
    "masked": (
        lambda x: x + torch.full_like(x, torch.finfo(torch.bfloat16).min).triu(1),
        normal(16, 16, dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("mode", PERT_MODES)
@pytest.mark.parametrize("name", list(WELL_CONDITIONED))
def test_a_right_kernel_on_well_conditioned_inputs_is_never_flagged(tmp_path: Path, mode: str, name: str) -> None:
    function, x = WELL_CONDITIONED[name]
    rows = check(tmp_path, {"kernel": function}, lambda kernels: kernels.kernel(x), pert_mode=mode)
    assert verdicts(rows) == {"ok"}


@pytest.mark.parametrize("mode", PERT_MODES)
@pytest.mark.parametrize("name", list(ILL_CONDITIONED))
def test_ill_conditioned_inputs_are_told_from_a_wrong_kernel(tmp_path: Path, mode: str, name: str) -> None:
    function, x = ILL_CONDITIONED[name]
    rows = check(tmp_path, {"kernel": function}, lambda kernels: kernels.kernel(x), pert_mode=mode)
    flagged = mode in NOISY or mode == "condition"
    assert verdicts(rows) == ({"ill-conditioned"} if flagged else {"ok"})


@pytest.mark.parametrize("mode", PERT_MODES)
def test_variance_as_a_difference_of_squares_is_a_bad_kernel(tmp_path: Path, mode: str) -> None:
    x = 1e5 + normal(4, 512)
    rows = check(tmp_path, {"kernel": textbook_variance}, lambda kernels: kernels.kernel(x), pert_mode=mode)
    if mode in ("improve_precision", "to_cpu", "condition"):
        assert verdicts(rows) == {"wrong kernel"}
    good = check(tmp_path / "good", {"kernel": stable_variance}, lambda kernels: kernels.kernel(x), pert_mode=mode)
    # the variance of numbers this far from zero is ill-conditioned, however it is computed
    assert verdicts(good) == (
        {"ill-conditioned"} if mode in ("add_noise", "bit_noise", "condition") else verdicts(good)
    )
    assert "wrong kernel" not in verdicts(good)


def test_condition_numbers_are_the_known_ones(tmp_path: Path) -> None:
    def number(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        rows = check(folder, {"kernel": function}, lambda kernels: kernels.kernel(x), pert_mode="condition")
        return float(rows[0]["condition"])

    x = normal(64, 64)
    assert 0.9 < number(lambda x: 3 * x, x) < 1.1
    assert 1.8 < number(torch.square, torch.ones(64)) < 2.2
    # exp(x) at x = 50: a relative change of x comes out 50 times as large
    assert 35 < number(torch.exp, torch.full((64,), 50.0)) < 55


def test_nondeterminism_is_found(tmp_path: Path) -> None:
    calls: list[int] = []

    def moody(x: Tensor) -> Tensor:
        calls.append(1)
        return x * (1 + 1e-6 * len(calls))

    rows = check(tmp_path, {"moody": moody}, lambda kernels: kernels.moody(normal(8)), pert_mode="no_change")
    assert verdicts(rows) == {"not deterministic"}


@pytest.mark.parametrize("direction", ["trunc", "ceil", "floor", "odd"])
def test_a_kernel_that_rounds_in_one_direction_is_named(tmp_path: Path, direction: str) -> None:
    from precision.free_benchmark.rounding import round_to

    def product(x: Tensor, y: Tensor) -> Tensor:
        return round_to(x.float() * y.float(), x.dtype, direction) if x.dtype == torch.bfloat16 else x * y

    x, y = (normal(64, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    rows = check(tmp_path, {"product": product}, lambda kernels: kernels.product(x, y), pert_mode="round_mode")
    assert verdicts(rows) == {"other rounding"}
    assert f"rounded by {direction}" in rows[0]["reason"]


def test_a_result_that_is_no_number_is_infinitely_far_from_one_that_is() -> None:
    right = normal(4096)
    wrong = right.clone()
    wrong[-1] = float("nan")
    assert distance(wrong, right).overall == float("inf")
    assert distance(wrong, wrong).overall == 0.0
    wrong[-1] = float("inf")
    assert distance(wrong, right).worst == float("inf")


def test_a_few_elements_name_no_rounding_mode() -> None:
    # 13 of 16 is what a coin gives one time in a hundred
    assert limits.agreement_limit(16) == 1.0
    assert limits.agreement_limit(9) > 1.0
    assert limits.agreement_limit(1000) == limits.AGREEMENT
