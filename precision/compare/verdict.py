"""What a difference means: equal, close for its dtype, or different."""

from __future__ import annotations

import math
from typing import Any

from precision.compare.metrics import TensorErrors

SAME, CLOSE, DIFFERENT, UNMATCHED, UNKNOWN = "same", "close", "different", "unmatched", "unknown"

# Largest relative L2 error that rounding explains, by the coarser of the two dtypes. A whole network in bfloat16 (8
# bits) drifts by about 1 % between two right implementations, one in float32 by about 1e-6.
TOLERANCES = {
    "float64": 1e-10,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 4e-2,
    "float8_e4m3fn": 0.15,
    "float8_e5m2": 0.3,
    "complex64": 1e-4,
    "complex128": 1e-10,
}
# a mean near zero says nothing, and the extremes are single elements: statistics get more room than whole tensors
STATISTICS_SLACK = 4.0


def tolerance(*dtypes: str) -> float:
    """The tolerance of the coarsest dtype; integers and booleans must be equal."""
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


def judge(errors: TensorErrors, allowed: float) -> str:
    """The verdict on two whole tensors."""
    if errors.equal:
        return SAME
    if errors.misplaced or not errors.relative_l2 <= allowed:
        return DIFFERENT
    return CLOSE


def judge_statistics(target: dict[str, Any], golden: dict[str, Any], allowed: float) -> tuple[str, float]:
    """The verdict where only statistics were dumped, and the largest difference relative to golden's scale.

    The scale of Max, Min and Mean is golden's largest absolute value, that of Norm the norm itself.
    """
    if target.get("md5") is not None and target.get("md5") == golden.get("md5"):
        return SAME, 0.0
    counts = [(meta["nan_count"], meta["inf_count"]) for meta in (target, golden) if "nan_count" in meta]
    if len(set(counts)) > 1:
        return DIFFERENT, math.inf
    pairs = [(key, figure(target.get(key)), figure(golden.get(key))) for key in ("Max", "Min", "Mean", "Norm")]
    known = [(key, ours, theirs) for key, ours, theirs in pairs if not (math.isnan(ours) and math.isnan(theirs))]
    if not known:
        # nothing in it, or nothing but NaN on both sides
        return (CLOSE, 0.0) if counts or 0 in target.get("shape", []) else (UNKNOWN, math.nan)
    extremes = [abs(theirs) for key, _, theirs in known if key in ("Max", "Min") and math.isfinite(theirs)]
    extreme = max(extremes, default=0.0)
    worst = 0.0
    for key, ours, theirs in known:
        scale = abs(theirs) if key == "Norm" else extreme
        worst = max(worst, relative_difference(ours, theirs, scale))
    if worst == 0.0 and target.get("md5") == golden.get("md5"):
        return SAME, 0.0
    return (CLOSE if worst <= allowed * STATISTICS_SLACK else DIFFERENT), worst


def figure(value: Any) -> float:
    """A statistic as a number; NaN for null."""
    return math.nan if value is None else float(value)


def relative_difference(ours: float, theirs: float, scale: float) -> float:
    """|ours - theirs| / scale, infinite where only one is a number or the scale is 0 and they differ."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    if not (math.isfinite(ours) and math.isfinite(theirs)) or scale == 0.0:
        return math.inf
    return abs(ours - theirs) / scale
