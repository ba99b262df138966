"""Running a call again in one of the modes, and what the second result says of the first."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Tuple

import torch
from torch import Tensor

from precision.dump.known_tensors import KnownTensors
from precision.free_benchmark import findings, limits
from precision.free_benchmark.config import NOISE_MODES, PRECISE_MODES, FreeBenchmarkConfig
from precision.free_benchmark.distance import CHUNK, ZERO, Distance, distance, norm_of, same_bits
from precision.free_benchmark.findings import Finding
from precision.free_benchmark.perturb import (
    Noise,
    flip_last_bit,
    is_activation,
    made_by_noise,
    made_by_swap,
    map_tensors,
    swap_ends,
)
from precision.free_benchmark.pieces import Piece, piece, piece_count
from precision.free_benchmark.rerun import Call, CannotRerunError, widen, widest
from precision.free_benchmark.rounding import ROUND_MODES, Agreement, agreement
from precision.interception import tensors_in

# Changes a tensor, and measures how much: (tensor, changed tensor) to relative change.
Change = Tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], float]]
CPU = torch.device("cpu")
# Probes per estimate of a condition number.
PROBES = 2
NO_FLOATS = "no floating-point number among its inputs"
NO_ACTIVATION = "no floating-point activation among its inputs"
NO_CHANGE = "the perturbation changed nothing: its activations are zero or all the same"
NO_RESULT = "no floating-point number among its results"
_DIRECTED = ("odd", "trunc", "ceil", "floor")


class Examiner:
    """Judges calls in the mode of its config; a reference, by API key, stands in for the call in to_cpu."""

    def __init__(self, config: FreeBenchmarkConfig) -> None:
        self.noise = Noise(config.seed)
        self._sizes: KnownTensors[float] = KnownTensors(same_layout=False, devices_across_steps=False)
        self.references: dict[str, Callable[..., Any]] = {}
        self.mode = config.pert_mode

    @property
    def change(self) -> Change:
        """What the noise modes do to a tensor, and how large a change that was."""
        if self.mode == "change_value":
            return swap_ends, self._made_by_swap
        return (flip_last_bit if self.mode == "bit_noise" else self.noise.scale), made_by_noise

    def next_step(self) -> None:
        """Make the same noise again, and forget the step's tensors."""
        self.noise.restart()
        self._sizes.next_step()

    def examine(self, call: Call, result: Any, part: int | None = None) -> list[Finding]:
        """Run the call again and compare, one finding per output.

        Args:
            result: of the call.
            part: only this piece of a call that has several (see pieces).

        Raises:
            CannotRerunError: when it can't be judged, with the reason.
        """
        if self.mode in PRECISE_MODES:
            return self.against_wider(call, result, part, CPU if self.mode == "to_cpu" else None)
        if self.mode in NOISE_MODES:
            return self._against_noise(call, result, part)
        if self.mode == "no_change":
            return self._against_itself(call, result, part)
        if self.mode == "round_mode":
            return self._rounding(call, result)
        return self._condition(call, result)

    # a wider precision

    def against_wider(
        self, call: Call, result: Any, part: int | None = None, device: torch.device | None = None
    ) -> list[Finding]:
        """Compare with the result in a wider precision, on `device` where given."""
        joined: dict[int, tuple[Distance, float]] = {}
        outputs = outputs_of(result)
        for cut, wider, again in self._wider_pieces(call, part, device):
            condition = math.nan
            for place, ours, theirs in _pairs(cut.of(result), again):
                gap = distance(ours, theirs)
                if gap.worst > limits.precision_limit(_dtype(call, ours), call.name) and math.isnan(condition):
                    condition = self._probe(call, wider, again, device, worst=True)
                before = joined.get(place, (ZERO, math.nan))
                joined[place] = (before[0].joined(gap), _larger(before[1], condition))
        return [
            _against_rounding(call, place, outputs[place], gap.worst, condition)
            for place, (gap, condition) in joined.items()
        ]

    def _wider_pieces(
        self, call: Call, part: int | None, device: torch.device | None
    ) -> Iterator[tuple[Piece, tuple[Any, Any], Any]]:
        """The pieces of a call, or only this one: each with its arguments in a wider precision and their result."""
        count = piece_count(call.name, call.args)
        for number in range(count) if part is None else [part % count]:
            cut = piece(call.name, number, count, *call.fresh())
            target = widest((cut.args, cut.kwargs))
            if target is None:
                raise CannotRerunError(NO_FLOATS)
            wider = widen((cut.args, cut.kwargs), target, device)
            yield cut, wider, self._again_wider(call, wider, device)

    def _again_wider(self, call: Call, wider: tuple[Any, Any], device: torch.device | None) -> Any:
        reference = self.references.get(call.key) if device is not None else None
        args, kwargs = map_tensors(wider, torch.clone) if call.in_place else wider
        if reference is None:
            return call.again_wider(args, kwargs)
        return reference(*args, **kwargs)

    def _probe(
        self, call: Call, wider: tuple[Any, Any], result: Any, device: torch.device | None, *, worst: bool
    ) -> float:
        """The condition number: the largest change of the wider result per change of the wider inputs."""
        found = 0.0
        for _ in range(PROBES):
            args, kwargs, made = perturbed(wider[0], wider[1], (self.noise.scale, made_by_noise))
            if made == 0.0:
                return 0.0
            again = self._again_wider(call, (args, kwargs), device)
            for _, ours, theirs in _pairs(again, result):
                if theirs.is_floating_point():
                    gap = distance(ours, theirs)
                    found = max(found, (gap.worst if worst else gap.overall) / made)
        return found

    # the same precision

    def _against_noise(self, call: Call, result: Any, part: int | None) -> list[Finding]:
        outputs = outputs_of(result)
        if not any(output.is_floating_point() for output in outputs):
            raise CannotRerunError(NO_RESULT)
        cut = _cut(call, part)
        args, kwargs, made = perturbed(cut.args, cut.kwargs, self.change)
        if made == 0.0:
            some = any(is_activation(tensor) for tensor in tensors_in((cut.args, cut.kwargs)))
            raise CannotRerunError(NO_CHANGE if some else NO_ACTIVATION)
        found = []
        for place, ours, theirs in _pairs(cut.of(result), call.again(args, kwargs)):
            if ours.is_floating_point():
                gap = distance(theirs, ours)
                if not math.isnan(gap.size):
                    self._sizes.put(ours, gap.size)
                found.append(noise_finding(place, outputs[place], gap.overall, made))
        return found

    def _made_by_swap(self, tensor: Tensor, changed: Tensor) -> float:
        """Relative change by swap_ends. One call's result is the next one's input: its size is known already."""
        size = self._sizes.get(tensor)
        if size is None:
            size = norm_of(tensor)
            self._sizes.put(tensor, size)
        return made_by_swap(changed, size)

    def _against_itself(self, call: Call, result: Any, part: int | None) -> list[Finding]:
        cut = _cut(call, part)
        outputs = outputs_of(result)
        found = []
        for place, ours, theirs in _pairs(cut.of(result), call.again(cut.args, cut.kwargs)):
            if same_bits(ours, theirs):
                found.append(_finding(place, outputs[place], 0.0, 0.0))
            else:
                gap = distance(ours, theirs).worst
                found.append(
                    _finding(place, outputs[place], gap, 0.0)._replace(
                        verdict=findings.NOT_DETERMINISTIC, reason="the same inputs gave another result"
                    )
                )
        return found

    # what the result says of its own rounding and of its inputs

    def _rounding(self, call: Call, result: Any) -> list[Finding]:
        outputs = outputs_of(result)
        counted: dict[int, Agreement] = {}
        for cut, _, again in self._wider_pieces(call, None, None):
            for place, ours, theirs in _pairs(cut.of(result), again):
                if ours.is_floating_point() and torch.finfo(theirs.dtype).bits > torch.finfo(ours.dtype).bits:
                    # in parts: every mode takes several copies of the result
                    for one, other in zip(ours.reshape(-1).split(CHUNK), theirs.reshape(-1).split(CHUNK)):
                        counted[place] = counted.get(place, Agreement()).joined(agreement(one, other))
        if not counted:
            raise CannotRerunError("its result is not narrower than the one it is compared with")
        return [_rounding_finding(place, outputs[place], agreed) for place, agreed in counted.items()]

    def _condition(self, call: Call, result: Any) -> list[Finding]:
        """A call in pieces is as ill-conditioned as the worst of them."""
        outputs = outputs_of(result)
        joined: dict[int, tuple[float, float]] = {}
        number = 0.0
        for cut, wider, again in self._wider_pieces(call, None, None):
            overall = self._probe(call, wider, again, None, worst=False)
            number = max(number, overall)
            for place, ours, theirs in _pairs(cut.of(result), again):
                if not ours.is_floating_point():
                    continue
                gap = distance(ours, theirs).worst
                local = overall
                if gap > limits.precision_limit(_dtype(call, ours), call.name):
                    local = self._probe(call, wider, again, None, worst=True)
                before = joined.get(place, (0.0, math.nan))
                joined[place] = (max(before[0], gap), _larger(before[1], local))
        if not joined:
            raise CannotRerunError(NO_RESULT)
        return [
            _condition_finding(call, place, outputs[place], gap, local, number)
            for place, (gap, local) in joined.items()
        ]


def _cut(call: Call, part: int | None) -> Piece:
    args, kwargs = call.fresh()
    if part is None:
        return Piece(args, kwargs, None)
    count = piece_count(call.name, args)
    return piece(call.name, part % count, count, args, kwargs) if count > 1 else Piece(args, kwargs, None)


def perturbed(args: Any, kwargs: Any, change: Change) -> tuple[Any, Any, float]:
    """Nested arguments with every activation changed, and the largest relative change that this really made."""
    made = 0.0
    make, measure = change

    def perturb(tensor: Tensor) -> Tensor:
        nonlocal made
        if not is_activation(tensor):
            return tensor
        changed = make(tensor.detach())
        made = max(made, measure(tensor, changed))
        return changed

    args, kwargs = map_tensors((args, kwargs), perturb)
    return args, kwargs, made


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors of a result; CannotRerunError when there are none."""
    outputs = list(tensors_in(result))
    if not outputs:
        raise CannotRerunError("no tensor among its results")
    return outputs


def _pairs(result: Any, again: Any) -> list[tuple[int, Tensor, Tensor]]:
    ours, theirs = outputs_of(result), list(tensors_in(again))
    if len(ours) != len(theirs):
        raise CannotRerunError(f"it gave {len(theirs)} tensors the second time instead of {len(ours)}")
    for one, other in zip(ours, theirs):
        if one.shape != other.shape:
            raise CannotRerunError(f"its result has another shape the second time: {tuple(other.shape)}")
    return [(place, *pair) for place, pair in enumerate(zip(ours, theirs))]


def _dtype(call: Call, output: Tensor) -> torch.dtype:
    """The dtype whose rounding the result carries: an operator may round in between to that of its inputs."""
    return limits.coarsest([tensor.dtype for tensor in (*call.inputs, output)])


def _against_rounding(call: Call, place: int, output: Tensor, error: float, condition: float) -> Finding:
    dtype = _dtype(call, output)
    return precision_finding(place, output, error, condition, dtype, limits.precision_limit(dtype, call.name))


def _finding(place: int, output: Tensor, error: float, limit: float) -> Finding:
    return Finding(place, str(output.dtype), str(output.shape), error, limit)


def precision_finding(
    place: int, output: Tensor, error: float, condition: float, dtype: torch.dtype, limit: float
) -> Finding:
    """A result held against one in a wider precision.

    Args:
        condition: NaN where it was not needed.
        limit: for well-conditioned inputs, see limits.
    """
    if not math.isnan(condition):
        limit += limits.accumulation_error(dtype) * condition
    finding = _finding(place, output, error, limit)._replace(condition=condition)
    if error <= limit:
        return finding
    reason = f"{error / limit:.3g} times as far from the wider precision as rounding explains"
    return finding._replace(verdict=findings.WRONG, reason=reason)


def noise_finding(place: int, output: Tensor, error: float, made: float) -> Finding:
    """A result held against that of inputs with a relative change of `made`."""
    # the result's own rounding hides changes below it
    rounding = 2 * limits.half_ulp(output.dtype)
    finding = _finding(place, output, error, limits.CONDITION * made + rounding)
    finding = finding._replace(condition=max(0.0, error - rounding) / made)
    if error <= finding.limit:
        return finding
    reason = f"a relative change of {made:.3g} in its inputs changed its result by {error:.3g}"
    return finding._replace(verdict=findings.ILL_CONDITIONED, reason=reason)


def _larger(one: float, other: float) -> float:
    """The larger of two numbers; NaN stands for none."""
    return max((value for value in (one, other) if not math.isnan(value)), default=math.nan)


def _condition_finding(call: Call, place: int, output: Tensor, error: float, local: float, number: float) -> Finding:
    """A result held against one in a wider precision, and its condition number; `local` is that of its worst block."""
    finding = _against_rounding(call, place, output, error, local)._replace(condition=number)
    if finding.flagged or number <= limits.CONDITION:
        return finding
    reason = f"a change of its inputs comes out {number:.3g} times as large, and the kernel is right"
    return finding._replace(verdict=findings.ILL_CONDITIONED, reason=reason)


def _rounding_finding(place: int, output: Tensor, agreed: Agreement) -> Finding:
    limit = 1 - limits.AGREEMENT
    count = agreed.inexact
    if count == 0:
        return _finding(place, output, 0.0, limit)._replace(reason="every element is exact or rounded more than once")
    shares = {mode: agreeing / count for mode, agreeing in zip(ROUND_MODES, agreed.modes)}
    text = ", ".join(f"{mode} {share:.2f}" for mode, share in shares.items())
    reason = f"{count / output.numel():.0%} of the elements hang on the rounding; agreement: {text}"
    finding = _finding(place, output, 1 - max(shares["rint"], shares["away"]), limit)._replace(reason=reason)
    best = max(shares, key=lambda mode: shares[mode])
    if best in _DIRECTED and shares[best] >= limits.agreement_limit(count) and finding.error > finding.limit:
        return finding._replace(verdict=findings.ROUNDING, reason=f"rounded by {best}; {reason}")
    return finding
