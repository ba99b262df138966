"""Gradients of one call's outputs and inputs, caught by hooks on the autograd graph's own nodes.

Nothing is put into the graph (msprobe and torch's full backward hooks insert identity functions), so neither the
numbers nor the order in which gradients are added up can change, and in-place operations stay possible.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

# (node, index of its output that the tensor is)
Edge = tuple[Any, int]
# A call's inside is a handful of nodes; a module's can be the whole model.
MAX_NODES = 100_000


class CallGradients:
    """Catches the gradients that flow back through one call, each reported once."""

    def __init__(
        self,
        input_edges: Sequence[Edge | None],
        outputs: Sequence[Tensor],
        on_output: Callable[[int, Tensor], None] | None,
        on_input: Callable[[int, Tensor], None],
        handles: list[Any],
    ) -> None:
        """
        Args:
            input_edges: what edges() said of the input tensors before the call.
            outputs: the result's tensors.
            on_output: called in backward with the place of an output and its gradient; None where nobody asks.
            on_input: called with the place of an input and this call's contribution to its gradient, summed over the
                input's uses inside the call.
            handles: where the hooks' handles go.
        """
        self._on_input = on_input
        self._sums: dict[int, Tensor] = {}
        self._missing: dict[int, int] = {}
        wanted: dict[Edge, list[int]] = {}
        for place, edge in enumerate(input_edges):
            if edge is not None:
                wanted.setdefault(edge, []).append(place)
        roots = []
        for place, output in enumerate(outputs):
            node = output.grad_fn
            if node is None or any(edge is not None and edge[0] is node for edge in input_edges):
                continue
            roots.append(node)
            if on_output is not None:
                handles.append(node.register_prehook(_output_hook(on_output, place, output.output_nr)))
        for node, uses in _uses(roots, wanted):
            for _, which in uses:
                for place in which:
                    self._missing[place] = self._missing.get(place, 0) + 1
            handles.append(node.register_hook(self._input_hook(uses)))

    def finish(self) -> None:
        """Report inputs of which only some uses took part in the backward pass."""
        sums, self._sums = self._sums, {}
        for place, total in sums.items():
            self._on_input(place, total)

    def _input_hook(self, uses: list[tuple[int, list[int]]]) -> Callable[[Any, Any], None]:
        def hook(inputs: tuple[Tensor | None, ...], outputs: Any) -> None:
            for number, which in uses:
                gradient = inputs[number] if number < len(inputs) else None
                for place in which:
                    self._add(place, gradient)

        return hook

    def _add(self, place: int, gradient: Tensor | None) -> None:
        self._missing[place] -= 1
        if gradient is not None:
            self._sums[place] = self._sums[place] + gradient if place in self._sums else gradient
        if self._missing[place] == 0 and place in self._sums:
            self._on_input(place, self._sums.pop(place))


def edges(tensors: Sequence[Tensor]) -> list[Edge | None]:
    """Where each tensor hangs in the graph right now; None for one that needs no gradient.

    To be called before an operation that may write to its input.
    """
    return [_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _edge(tensor: Tensor) -> Edge | None:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    # a leaf hangs on its AccumulateGrad node, which only a function of it leads to
    with torch.enable_grad():
        function = tensor.view_as(tensor).grad_fn
    return (function.next_functions[0][0], 0) if function is not None else None


def _uses(roots: list[Any], wanted: dict[Edge, list[int]]) -> list[tuple[Any, list[tuple[int, list[int]]]]]:
    """The nodes between the roots and the wanted edges that lead to one: (node, [(place among its inputs, which)])."""
    found = []
    ends = {node for node, _ in wanted}
    seen = {None, *ends, *roots}
    queue = list(roots)
    while queue and len(seen) < MAX_NODES:
        node = queue.pop()
        uses = []
        for place, edge in enumerate(node.next_functions):
            child = edge[0]
            if child not in seen:
                seen.add(child)
                queue.append(child)
            elif child in ends and edge in wanted:
                uses.append((place, wanted[edge]))
        if uses:
            found.append((node, uses))
    return found


def _output_hook(report: Callable[[int, Tensor], None], place: int, number: int) -> Callable[[Any], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number] if number < len(gradients) else None
        if gradient is not None:
            report(place, gradient)

    return hook
