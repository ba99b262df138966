"""Rules that say when a figure is not as it should be, each with the first module and step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch

from precision.errors import PrecisionError
from precision.monitor.config import AlertRule
from precision.monitor.records import MICRO_STEP_KINDS, SCALAR_KINDS, kind_order, module_of
from precision.monitor.statistics import OPS

NORM, MIN, MAX, NANS = (OPS.index(op) for op in ("norm", "min", "max", "nans"))
_GRADIENTS = ("actv_grad", "grad_unreduced", "grad_reduced")
# Figures that a loss needs behind it before it can be called a spike.
ENOUGH = 5


@dataclass
class History:
    """Running mean and spread of one row's figure over the steps."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Take a value in; one that isn't finite says nothing about the run before it and is left out."""
        if math.isfinite(value):
            self.count += 1
            difference = value - self.mean
            self.mean += difference / self.count
            self.squares += difference * (value - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Observation(NamedTuple):
    """A row of a step, as rules see it; value is the norm, or the scalar itself."""

    kind: str
    name: str
    value: float
    figures: list[float]
    numel: int
    history: History


class Alert(NamedTuple):
    """Something is wrong.

    Attributes:
        place: of the row within its step, to find the first of several alerts.
        module: that the row belongs to.
    """

    step: int
    rank: int
    place: int
    kind: str
    name: str
    module: str
    micro_step: int
    rule: str
    message: str

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts alerts of several ranks by when they happened."""
        return self.step, kind_order(self.kind), self.place

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.kind} {self.name}: {self.rule}, {self.message}"


def _turbulence(seen: Observation, threshold: float) -> str | None:
    mean = seen.history.mean
    if seen.history.count and abs(seen.value) > abs(mean) * (1 + threshold):
        return f"{seen.value:.4g} is more than {1 + threshold:g} times the mean so far, {mean:.4g}"
    return None


def _not_finite(seen: Observation, threshold: float) -> str | None:
    nans = seen.figures[NANS]
    if nans > 0:
        return f"{nans:.0f} of {seen.numel} elements are NaN"
    # an infinite norm can be the square's overflow: the extremes tell
    if math.isinf(seen.figures[MIN]) or math.isinf(seen.figures[MAX]):
        return "there are infinite elements"
    if seen.kind in SCALAR_KINDS and not math.isfinite(seen.value):
        return f"the value is {seen.value}"
    return f"{seen.value:.4g} is beyond {threshold:g}" if abs(seen.value) > threshold else None


def _constant(seen: Observation, threshold: float) -> str | None:
    low, high = seen.figures[MIN], seen.figures[MAX]
    if seen.numel > 1 and low == high:
        return f"all {seen.numel} elements are {low:.4g}"
    return None


def _explosion(seen: Observation, threshold: float) -> str | None:
    if seen.history.count and seen.value > threshold * seen.history.mean:
        return f"norm {seen.value:.4g} is more than {threshold:g} times the mean so far, {seen.history.mean:.4g}"
    return None


def _vanishing(seen: Observation, threshold: float) -> str | None:
    return f"norm {seen.value:.4g} is below {threshold:g}" if seen.value < threshold else None


def _spike(seen: Observation, threshold: float) -> str | None:
    history = seen.history
    if history.count >= ENOUGH and seen.value > history.mean + threshold * max(
        history.deviation, 1e-3 * abs(history.mean)
    ):
        return (
            f"{seen.value:.4g} is more than {threshold:g} standard deviations ({history.deviation:.3g}) above the mean "
            f"so far, {history.mean:.4g}"
        )
    return None


class Rule(NamedTuple):
    """What a rule looks at.

    Attributes:
        check: the message, or None where all is well.
        threshold: unless the user gives another.
        kinds: of rows; None for all.
        outputs_only: whether only what modules give is looked at.
        needs: figures that are computed for it.
    """

    check: Callable[[Observation, float], str | None]
    threshold: float
    kinds: tuple[str, ...] | None
    outputs_only: bool = False
    needs: tuple[str, ...] = ("norm",)


RULES = {
    "AnomalyTurbulence": Rule(_turbulence, 0.5, ("actv", *_GRADIENTS)),
    "AnomalyNan": Rule(_not_finite, math.inf, None, needs=("norm", "min", "max", "nans")),
    "ConstantOutput": Rule(_constant, 0.0, ("actv",), outputs_only=True, needs=("min", "max")),
    "GradientExplosion": Rule(_explosion, 10.0, _GRADIENTS),
    "GradientVanishing": Rule(_vanishing, 1e-10, _GRADIENTS),
    "LossSpike": Rule(_spike, 5.0, ("loss",)),
}


class Alerts:
    """Checks every row of every step.

    Attributes:
        found: the first alert of each rule, kind and row.
        needs: figures that the rules look at.
    """

    def __init__(self, rules: list[AlertRule], rank: int) -> None:
        """
        Raises:
            PrecisionError: for a rule or an argument that there isn't.
        """
        self._rules: list[tuple[str, Rule, float]] = []
        self._rank = rank
        self._histories: dict[tuple[str, str, int], History] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self.found: list[Alert] = []
        self.needs: set[str] = set()
        for entry in rules:
            if entry.rule_name not in RULES:
                raise PrecisionError(f"no alert rule {entry.rule_name!r}; there are {', '.join(RULES)}")
            if set(entry.args) - {"threshold"}:
                raise PrecisionError(
                    f"rule {entry.rule_name} takes the argument threshold, not {', '.join(entry.args)}"
                )
            rule = RULES[entry.rule_name]
            self._rules.append((entry.rule_name, rule, entry.args.get("threshold", rule.threshold)))
            self.needs.update(rule.needs)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def check(
        self, step: int, place: int, kind: str, name: str, micro_step: int, figures: list[float], shape: torch.Size
    ) -> list[Alert]:
        """Look at one row; returns the alerts that are new."""
        key = (kind, name, micro_step if kind in MICRO_STEP_KINDS else 0)
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History()
        seen = Observation(kind, name, figures[NORM], figures, shape.numel(), history)
        new = []
        for rule_name, rule, threshold in self._rules:
            if rule.kinds is not None and kind not in rule.kinds:
                continue
            if rule.outputs_only and ".output" not in name:
                continue
            message = rule.check(seen, threshold)
            if message is not None and (rule_name, kind, name) not in self._seen:
                self._seen.add((rule_name, kind, name))
                module = module_of(kind, name)
                new.append(Alert(step, self._rank, place, kind, name, module, micro_step, rule_name, message))
        history.add(seen.value)
        self.found += new
        return new


def first(alerts: list[Alert]) -> Alert | None:
    """The one that happened first, over all ranks."""
    return min(alerts, key=lambda alert: alert.order, default=None)
