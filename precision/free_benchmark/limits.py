"""How far apart is too far, by dtype and by mode.

A kernel may round its result once, and lose what a float32 accumulation loses on inputs that are as ill-conditioned as
these: limit = ROUNDINGS * half a unit in the last place + condition number * float32's rounding. The condition number
is estimated only where the first term is not enough.
"""

from __future__ import annotations

import torch

# One rounding is 1 at most and 0.5 on average over a block. A fused kernel rounds in between as well (a norm: the sum,
# the normalised values, the product), and a scale that is off by 1 % is 2.6 in bfloat16.
ROUNDINGS = 1.75
# A gradient's formula has more steps than the result's: that of a norm in bfloat16 is 2.1 on a CPU.
ROUNDINGS_OF_GRADIENTS = 2.25
# A sum of products is rounded once, when it is complete. Sums that are rounded on the way are to be found, so there is
# room for one rounding. Another one at the end, when a bias is added, stays below all the same: over a block, random
# roundings are 0.6 at most.
ROUNDINGS_OF_SUMS = 1.0
SUMS = frozenset(("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"))
# Kernels compute float32 and float64 in their own precision: what the order of a sum changes is more than one rounding.
OWN_PRECISION_ROUNDINGS = 64.0
# Relative error of float32 accumulation per unit of the condition number.
ACCUMULATION = 4.0
# An operator that amplifies a relative change of its inputs by more than this is ill-conditioned where it stands.
CONDITION = 100.0
# Share of inexact elements that must agree with another rounding mode than "to nearest" to be called that mode.
AGREEMENT = 0.75
# Standard deviations above one half, which is what two modes agree in by chance.
CERTAINTY = 4.0


def half_ulp(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to the nearest number of the dtype."""
    return float(torch.finfo(dtype).eps) / 2


def coarsest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The floating-point dtype with the fewest bits of mantissa among those given, float64 for none."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: float(torch.finfo(dtype).eps), default=torch.float64)


def precision_limit(dtype: torch.dtype, api: str = "") -> float:
    """Limit of the distance between a result and the same in a wider precision, for well-conditioned inputs.

    Args:
        api: name of the function without its family.
    """
    if torch.finfo(dtype).bits > 16:
        return OWN_PRECISION_ROUNDINGS * half_ulp(dtype)
    return (ROUNDINGS_OF_SUMS if api in SUMS else ROUNDINGS) * half_ulp(dtype)


def gradient_limit(dtype: torch.dtype) -> float:
    """The same for a gradient."""
    return (ROUNDINGS_OF_GRADIENTS if torch.finfo(dtype).bits <= 16 else OWN_PRECISION_ROUNDINGS) * half_ulp(dtype)


def agreement_limit(count: int) -> float:
    """Share of `count` inexact elements that names a rounding mode; above 1 where they are too few to tell."""
    return max(AGREEMENT, 0.5 + CERTAINTY * 0.5 / count**0.5)


def accumulation_error(dtype: torch.dtype) -> float:
    """What a kernel's own accumulation may add per unit of the condition number."""
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    return ACCUMULATION * half_ulp(inside)
