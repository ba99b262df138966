"""Hooks on the watched modules: what goes in and comes out, and the gradients of both.

Training and evaluation mode are alike. Gradients are caught on the autograd graph's own nodes (precision.gradients), so
nothing is put into the graph.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precision.errors import PrecisionError
from precision.gradients import CallGradients, edges
from precision.monitor.collector import Collector
from precision.monitor.targets import all_inputs, arguments, select


class ActivationHooks:
    """The hooks of one model, until remove().

    Attributes:
        names: of the watched modules.
        ran: of those that were called.
        misfits: what didn't fit its selector any more after the first call, by module and side.
    """

    def __init__(
        self, model: nn.Module, sides_by_name: dict[str, dict[str, str]], collector: Collector, vpp_stage: int
    ) -> None:
        self.names = list(sides_by_name)
        self.ran: set[str] = set()
        self.misfits: set[str] = set()
        self._open: list[CallGradients] = []
        self._graph_handles: list[Any] = []
        self._handles: list[RemovableHandle] = []
        for name, sides in sides_by_name.items():
            hook = _ModuleHook(name, sides, collector, vpp_stage, self)
            module = model.get_submodule(name)
            if hook.needs_before:
                self._handles.append(module.register_forward_pre_hook(hook.before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(hook.after))

    def remove(self) -> None:
        """Take every hook off, those in living graphs included."""
        for handle in (*self._handles, *self._graph_handles):
            handle.remove()
        self._handles = []
        self._graph_handles = []
        self._open = []

    def end_pass(self) -> None:
        """A backward pass is over, or the next forward pass begins: report gradients of which parts are missing."""
        with torch.no_grad():
            for gradients in self._open:
                gradients.finish()
        self._open = []
        self._graph_handles = []

    def catch_inputs(self, inputs: list[Any], outputs: list[Tensor], report: Callable[[int, Tensor], None]) -> None:
        """Have the call's contributions to its inputs' gradients reported, by the input's place."""
        if any(inputs):
            # outputs' gradients come from hooks on the tensors, which identity modules have as well
            self._open.append(CallGradients(inputs, outputs, None, report, self._graph_handles))

    def catch_outputs(self, outputs: list[Tensor], report: Callable[[int, Tensor], None]) -> None:
        """Have the outputs' gradients reported, by the output's place."""
        for place, output in enumerate(outputs):
            if output.requires_grad:
                self._graph_handles.append(output.register_hook(lambda gradient, place=place: report(place, gradient)))


class _ModuleHook:
    """The hooks of one module."""

    def __init__(
        self, name: str, sides: dict[str, str], collector: Collector, vpp_stage: int, owner: ActivationHooks
    ) -> None:
        self._name = name
        self._sides = sides
        self._collector = collector
        self._vpp_stage = vpp_stage
        self._owner = owner
        self._input = sides.get("input")
        self._output = sides.get("output")
        self._input_grad = sides.get("input_grad")
        self._output_grad = sides.get("output_grad")
        self.needs_before = self._input is not None or self._input_grad is not None
        self._checked: set[str] = set()
        # by side, number of tensors and call within the pass
        self._known_names: dict[tuple[str, int, int], list[str]] = {}
        self._pass = -1
        # calls in this pass, and recomputations of them
        self._calls = self._recomputed = 0
        # input edges of the calls that haven't returned, innermost last
        self._edges: list[list[Any]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._collector.on:
            return
        if self._input is not None and not _in_backward():
            self._add("actv", "input", self._inputs(self._input, "input", args, kwargs))
        if self._input_grad is not None and torch.is_grad_enabled():
            if self._pass != self._collector.passes:
                # a call that raised left its edges behind
                self._edges = []
            self._edges.append(edges(self._inputs(self._input_grad, "input_grad", args, kwargs)))

    def after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        collector = self._collector
        if not collector.on:
            return
        self._owner.ran.add(self._name)
        if self._pass != collector.passes:
            self._pass, self._calls, self._recomputed = collector.passes, 0, 0
        if self._output is not None and not _in_backward():
            self._add("actv", "output", self._select(self._output, "output", result))
        wants_gradients = self._input_grad is not None or self._output_grad is not None
        if wants_gradients and torch.is_grad_enabled():
            self._catch(result)
        if _in_backward():
            self._recomputed += 1
        else:
            self._calls += 1

    def _catch(self, result: Any) -> None:
        if self._output_grad is not None:
            outputs = self._select(self._output_grad, "output_grad", result)
            self._owner.catch_outputs(outputs, self._reporter("output", len(outputs)))
        if self._input_grad is not None:
            inputs = self._edges.pop() if self._edges else []
            self._owner.catch_inputs(inputs, select(result, "all", ""), self._reporter("input", len(inputs)))

    def _reporter(self, side: str, count: int) -> Callable[[int, Tensor], None]:
        names = self._names(side, count)
        collector, vpp_stage = self._collector, self._vpp_stage
        micro_step = max(collector.micro_step, 0)

        def report(place: int, gradient: Tensor) -> None:
            if collector.on:
                collector.add("actv_grad", names[place], gradient, micro_step, vpp_stage)

        return report

    def _add(self, kind: str, side: str, tensors: list[Tensor]) -> None:
        collector = self._collector
        micro_step = max(collector.micro_step, 0)
        for name, tensor in zip(self._names(side, len(tensors)), tensors):
            collector.add(kind, name, tensor, micro_step, self._vpp_stage)

    def _names(self, side: str, count: int) -> list[str]:
        calls = self._recomputed if _in_backward() else self._calls
        key = (side, count, calls if self._pass == self._collector.passes else 0)
        names = self._known_names.get(key)
        if names is None:
            again = f".call{key[2]}" if key[2] else ""
            places = [""] if count == 1 else [f"_{place}" for place in range(count)]
            names = self._known_names[key] = [f"{self._name}.{side}{place}{again}" for place in places]
        return names

    def _inputs(self, selector: str, side: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if selector == "all":
            return all_inputs(args, kwargs)
        given = arguments(args, kwargs)
        # a single argument is written "tensor" or "tuple[1]:0"
        return self._select(selector, side, given[0] if len(given) == 1 and selector == "tensor" else given)

    def _select(self, selector: str, side: str, value: Any) -> list[Tensor]:
        try:
            found = select(value, selector, f"the {side} of {self._name or 'the model'}")
        except PrecisionError as error:
            if side not in self._checked:
                raise
            # a run that has begun isn't stopped by what it is watched with
            self._owner.misfits.add(str(error))
            return []
        self._checked.add(side)
        return found


def _in_backward() -> bool:
    """Whether this forward is a recomputation, for activation checkpointing: its activations were measured before."""
    return torch._C._current_graph_task_id() != -1
