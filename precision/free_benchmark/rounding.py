"""A wide result rounded to a narrow dtype in each way the NPU's vector unit can (the CAST modes of Ascend C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUND_MODES = ("rint", "away", "odd", "trunc", "ceil", "floor")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def round_to(values: Tensor, dtype: torch.dtype, mode: str) -> Tensor:
    """`values`, of a wider dtype, rounded to `dtype`.

    Args:
        mode: "rint" to nearest, ties to even; "away" to nearest, ties away from zero (A); "odd" to the neighbour whose
            last bit is 1 (O); "trunc" toward zero; "ceil" up; "floor" down. Exact values stay as they are in all.

    Raises:
        ValueError: for another mode.
    """
    if mode not in ROUND_MODES:
        raise ValueError(f"no rounding mode {mode!r}; there are {', '.join(ROUND_MODES)}")
    nearest = values.to(dtype)
    if mode == "rint":
        return nearest
    back = nearest.to(values.dtype)
    below = torch.where(back > values, _neighbour(nearest, -1), nearest)
    above = torch.where(back < values, _neighbour(nearest, 1), nearest)
    if mode == "ceil":
        return above
    if mode == "floor":
        return below
    inward = torch.where(values < 0, above, below)
    if mode == "trunc":
        return inward
    outward = torch.where(values < 0, below, above)
    if mode == "odd":
        return torch.where((below.view(_integer(dtype)) & 1) == 1, below, above)
    tie = (values - below.to(values.dtype)) == (above.to(values.dtype) - values)
    return torch.where(tie, outward, nearest)


class Agreement(NamedTuple):
    """
    Attributes:
        inexact: elements that were rounded, once.
        modes: how many of them each of ROUND_MODES gives.
    """

    inexact: int = 0
    modes: tuple[int, ...] = (0,) * len(ROUND_MODES)

    def joined(self, other: Agreement) -> Agreement:
        return Agreement(self.inexact + other.inexact, tuple(map(sum, zip(self.modes, other.modes))))


def agreement(result: Tensor, exact: Tensor) -> Agreement:
    """Which rounding modes explain a result, given the same in a wider dtype."""
    rounded = [round_to(exact, result.dtype, mode) == result for mode in ROUND_MODES]
    # what is off by more than the two neighbours was not rounded once
    near = rounded[ROUND_MODES.index("floor")] | rounded[ROUND_MODES.index("ceil")]
    inexact = (result.to(exact.dtype) != exact) & near & torch.isfinite(exact)
    return Agreement(int(inexact.sum()), tuple(int((agrees & inexact).sum()) for agrees in rounded))


def _neighbour(values: Tensor, direction: int) -> Tensor:
    """The next number of the dtype up (1) or down (-1)."""
    integer = _integer(values.dtype)
    bits = values.contiguous().view(integer)
    smallest = torch.full_like(bits, 1) if direction > 0 else torch.full_like(bits, torch.iinfo(integer).min + 1)
    step = torch.where((bits >= 0) == (direction > 0), bits + 1, bits - 1)
    return torch.where(values == 0, smallest, step).view(values.dtype)


def _integer(dtype: torch.dtype) -> torch.dtype:
    return _INTEGERS[torch.finfo(dtype).bits // 8]
