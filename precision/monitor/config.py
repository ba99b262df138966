"""What the monitor may be asked: the keys of msprobe's trainer monitor, checked before anything runs."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Literal, Optional, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from precision.config import expand_numbers
from precision.errors import PrecisionError

Op = Literal["norm", "min", "max", "mean", "zeros", "nans"]
SIDES = ("input", "output", "input_grad", "output_grad")
_SELECTOR = re.compile(r"tensor|tuple\[(\d+)\]:(\d+)")


class Target(BaseModel):
    """Which tensors of a module: "tensor" or "tuple[N]:I" per side; a target without sides means all of all four."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Optional[str] = None
    output: Optional[str] = None
    input_grad: Optional[str] = None
    output_grad: Optional[str] = None

    @field_validator("*")
    @classmethod
    def _known_form(cls, value: Optional[str]) -> Optional[str]:
        match = _SELECTOR.fullmatch(value) if value is not None else None
        if value is not None and match is None:
            raise ValueError(f'{value!r} is neither "tensor" nor "tuple[N]:I" (entry I of N)')
        if match is not None and match[1] is not None and int(match[2]) >= int(match[1]):
            raise ValueError(
                f"{value!r}: entry {match[2]} of a tuple of {match[1]}; the last one is {int(match[1]) - 1}"
            )
        return value


class AlertRule(BaseModel):
    """A rule by name, with its arguments; precision.monitor.alerts knows which there are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule_name: str
    args: Dict[str, float] = Field(default_factory=dict)


class Alert(BaseModel):
    """
    Attributes:
        rules: see precision.monitor.alerts.RULES.
        dump: whether the first alert makes a PrecisionDebugger dump the next step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: List[AlertRule] = Field(default_factory=list)
    dump: bool = False


class MonitorConfig(BaseModel):
    """One validated set of options.

    Attributes:
        targets: modules by dotted name, and what of them; {} with all_xy for every module.
        all_xy: every module, beside the targets.
        xy_distribution: activations and their gradients; on when there are targets and nothing else is asked for.
        forward_only, backward_only: activations only, or their gradients only.
        wg_distribution: weight gradients, before the reduction over ranks and at the optimizer's step.
        mv_distribution: the optimizer's moments after its step.
        param_distribution: weights before and after the optimizer's step.
        generation: entropy and margin of the logits, norms of the KV cache by layer, tokens per second.
        ops: figures, of norm, min, max, mean, zeros (share of elements below eps), nans (their number).
        eps: what counts as zero.
        ndigits: significant digits in the CSV files.
        format: "csv", "tensorboard" or "both".
        page: whether close() writes monitor.html.
        live: a line on stderr for each step.
        start_step, step_interval, collect_times: which steps; collect_times 0 for no end.
        step_count_per_record: steps per CSV file.
        dynamic_on: whether to collect; the config file is read again when it changes.
        print_struct: print the modules with what goes in and out, in the first forward pass.
        module_ranks: ranks that collect, [] for all; a process without a group is rank 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Dict[str, Target] = Field(default_factory=dict)
    all_xy: bool = False
    xy_distribution: bool = False
    forward_only: bool = False
    backward_only: bool = False
    wg_distribution: bool = False
    mv_distribution: bool = False
    param_distribution: bool = False
    generation: bool = False
    ops: List[Op] = Field(default_factory=lambda: list(get_args(Op)))
    eps: float = Field(1e-8, ge=0)
    ndigits: int = Field(6, ge=1, le=17)
    format: Literal["csv", "tensorboard", "both"] = "csv"
    page: bool = True
    live: bool = False
    start_step: int = Field(0, ge=0)
    step_interval: int = Field(1, ge=1)
    collect_times: int = Field(0, ge=0)
    step_count_per_record: int = Field(1, ge=1)
    dynamic_on: bool = True
    print_struct: bool = False
    module_ranks: List[int] = Field(default_factory=list)
    alert: Alert = Field(default_factory=Alert)

    @field_validator("module_ranks", mode="before")
    @classmethod
    def _ranks(cls, value: Any) -> Any:
        # the published example writes "0", which its own tool refuses
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return expand_numbers(value)

    @property
    def activations(self) -> bool:
        """Whether modules are hooked at all."""
        others = self.wg_distribution or self.mv_distribution or self.param_distribution or self.generation
        return self.xy_distribution or self.all_xy or (bool(self.targets) and not others)

    def collects(self, step: int) -> bool:
        """Whether a step is one of those asked for."""
        place, left = divmod(step - self.start_step, self.step_interval)
        return place >= 0 and left == 0 and (not self.collect_times or place < self.collect_times)

    def over(self, step: int) -> bool:
        """Whether no step from this one on is collected."""
        return bool(self.collect_times) and step > self.start_step + (self.collect_times - 1) * self.step_interval


def make_monitor_config(values: Dict[str, Any]) -> MonitorConfig:
    """A MonitorConfig from keyword values.

    Raises:
        PrecisionError: naming the key, the value, and the keys or values there are; also when nothing would be
            collected.
    """
    unknown = sorted(set(values) - set(MonitorConfig.model_fields))
    if unknown:
        raise PrecisionError(
            f"no option {', '.join(unknown)}; there are {', '.join(sorted(MonitorConfig.model_fields))}"
        )
    try:
        config = MonitorConfig(**values)
    except ValidationError as error:
        raise PrecisionError("; ".join(_explain(entry) for entry in error.errors())) from error
    others = (config.wg_distribution, config.mv_distribution, config.param_distribution, config.generation)
    if config.xy_distribution and not config.targets:
        # as in msprobe, where no target means every module
        config = config.model_copy(update={"all_xy": True})
    if not config.activations and not any(others):
        raise PrecisionError(
            "nothing to collect: give targets or all_xy, or switch on one of wg_distribution, mv_distribution, "
            "param_distribution, generation"
        )
    if config.forward_only and config.backward_only:
        raise PrecisionError("forward_only and backward_only leave nothing of the activations; set one of them")
    return config


def _explain(entry: Any) -> str:
    where = ".".join(str(part) for part in entry["loc"]) or "config"
    text = entry["msg"][len("Value error, ") :] if entry["msg"].startswith("Value error, ") else entry["msg"]
    return f"{where} = {entry.get('input')!r}: {text}"
