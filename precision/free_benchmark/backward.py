"""Checking a call's gradients: they are computed again from its inputs and compared with the model's own."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, Callable, List, Optional

import torch
from torch import Tensor

from precision.free_benchmark import findings, limits
from precision.free_benchmark.config import NOISE_MODES, PRECISE_MODES
from precision.free_benchmark.distance import distance, same_bits
from precision.free_benchmark.examine import (
    CPU,
    NO_CHANGE,
    PROBES,
    Examiner,
    noise_finding,
    outputs_of,
    perturbed,
    precision_finding,
)
from precision.free_benchmark.findings import Finding, not_checked
from precision.free_benchmark.perturb import made_by_noise, map_tensors
from precision.free_benchmark.rerun import Call, CannotRerunError, widen, widest
from precision.gradients import CallGradients, edges

Gradients = List[Optional[Tensor]]
NO_GRADIENT = "no gradient reached it: nothing in it needs one, or no backward pass came through"


class BackwardCheck:
    """Watches one call of the forward pass until its gradients are there.

    To be made before the call. Its inputs are kept, and copied where the call writes to them.
    """

    def __init__(self, call: Call, examiner: Examiner) -> None:
        self._call = call
        self._examiner = examiner
        self._edges = edges(call.inputs) if torch.is_grad_enabled() else [None] * len(call.inputs)
        self._places = [place for place, edge in enumerate(self._edges) if edge is not None]
        self._incoming: dict[int, Tensor] = {}
        self._again: tuple[Gradients, float, Callable[[], float]] | None = None
        self._reported = False
        self._judged = 0
        self._gradients: CallGradients | None = None
        self._handles: list[Any] = []

    def follow(
        self,
        outputs: list[Tensor],
        keep: Callable[[list[Finding]], None],
        unobserved: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """The call has been made with these results.

        Args:
            keep: is given the findings as gradients come in.
            unobserved: a context in which calls are not taken for the model's.
        """
        self._keep, self._unobserved = keep, unobserved
        try:
            self._call.done()
        except CannotRerunError as reason:
            self._report([not_checked(str(reason))])
            return
        if self._places and any(output.requires_grad for output in outputs):
            self._gradients = CallGradients(self._edges, outputs, self._arrived, self._left, self._handles)

    def finish(self) -> None:
        """The step is over: report what is missing and let go of the inputs."""
        if self._gradients is not None:
            self._gradients.finish()
        for handle in self._handles:
            handle.remove()
        if not self._reported:
            self._report([not_checked(NO_GRADIENT)])

    def _arrived(self, place: int, gradient: Tensor) -> None:
        self._incoming[place] = gradient

    def _left(self, place: int, gradient: Tensor) -> None:
        """The model's gradient of an input is there: the one to compare with is computed for all inputs at once."""
        index = self._places.index(place)
        try:
            if self._again is None:
                with self._unobserved():
                    self._again = self._compute()
            again, made, condition = self._again
            other = again[index]
            if other is None:
                raise CannotRerunError("it gave no gradient the second time")
            with self._unobserved(), torch.no_grad():
                self._report([self._judge(index, gradient, other, made, condition)])
        except CannotRerunError as reason:
            self._report([not_checked(str(reason))])
        self._judged += 1
        if self._judged == len(self._places):
            # nothing more to come: the copies of a whole model's gradients would not fit beside it
            self._again = None
            self._incoming = {}

    def _report(self, found: list[Finding]) -> None:
        self._reported = True
        self._keep(found)

    def _judge(
        self, index: int, gradient: Tensor, other: Tensor, made: float, condition: Callable[[], float]
    ) -> Finding:
        mode = self._examiner.mode
        if gradient.shape != other.shape:
            raise CannotRerunError(f"its gradient has another shape the second time: {tuple(other.shape)}")
        if mode in NOISE_MODES:
            return noise_finding(index, gradient, distance(other, gradient).overall, made)
        if mode in PRECISE_MODES:
            gap = distance(gradient, other).worst
            dtype = limits.coarsest([*(tensor.dtype for tensor in self._call.inputs), gradient.dtype])
            limit = limits.gradient_limit(dtype)
            return precision_finding(index, gradient, gap, condition() if gap > limit else math.nan, dtype, limit)
        finding = Finding(index, str(gradient.dtype), str(gradient.shape), distance(gradient, other).worst, 0.0)
        if same_bits(gradient, other):
            return finding._replace(error=0.0)
        return finding._replace(verdict=findings.NOT_DETERMINISTIC, reason="the same inputs gave another gradient")

    def _compute(self) -> tuple[Gradients, float, Callable[[], float]]:
        """Gradients of the second run, the relative change made, and what estimates the condition number."""
        if not self._call.in_place:
            self._call.check_unchanged()
        mode = self._examiner.mode
        given = (self._call.args, self._call.kwargs)
        if mode == "no_change":
            return self._run(given, self._incoming), 0.0, _no_condition
        if mode in NOISE_MODES:
            changed, incoming, made = perturbed(given, self._incoming, self._examiner.change)
            if made == 0.0:
                raise CannotRerunError(NO_CHANGE)
            return self._run(changed, incoming), made, _no_condition
        target = widest(given)
        if target is None:
            raise CannotRerunError("no floating-point number among its inputs")
        device = CPU if mode == "to_cpu" else None
        wide = widen(given, target, device)
        incoming = widen(self._incoming, target, device)
        exact = self._run(wide, incoming)
        return exact, 0.0, lambda: self._condition(wide, incoming, exact)

    def _condition(self, wide: Any, incoming: dict[int, Tensor], exact: Gradients) -> float:
        found = 0.0
        for _ in range(PROBES):
            changed, shaken, made = perturbed(wide, incoming, (self._examiner.noise.scale, made_by_noise))
            for ours, theirs in zip(self._run(changed, shaken), exact):
                if ours is not None and theirs is not None and made > 0.0:
                    found = max(found, distance(ours, theirs).worst / made)
        return found

    def _run(self, given: Any, incoming: dict[int, Tensor]) -> Gradients:
        """The gradients of the inputs that need one, in their order."""
        leaves: list[Tensor] = []
        place = -1

        def leaf(tensor: Tensor) -> Tensor:
            nonlocal place
            place += 1
            if self._edges[place] is None:
                return tensor.detach()
            leaves.append(tensor.detach().requires_grad_())
            # an operator in place may not write to a leaf
            return leaves[-1].clone() if self._call.in_place else leaves[-1]

        with torch.enable_grad():
            args, kwargs = map_tensors(given, leaf)
            outputs = outputs_of(self._call.again(args, kwargs))
            reached = [place for place in incoming if outputs[place].requires_grad]
            try:
                found = torch.autograd.grad(
                    [outputs[place] for place in reached],
                    leaves,
                    [incoming[place].to(outputs[place].dtype) for place in reached],
                    allow_unused=True,
                )
            except RuntimeError as error:
                raise CannotRerunError(
                    f"its gradient can't be computed again: {str(error).splitlines()[0][:160]}"
                ) from error
        return list(found)


def _no_condition() -> float:
    return math.nan
