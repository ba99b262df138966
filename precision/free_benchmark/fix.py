"""Handler "fix": the model goes on with the result that a call has in a wider precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precision.free_benchmark.config import FreeBenchmarkConfig
from precision.free_benchmark.examine import CPU, NO_FLOATS
from precision.free_benchmark.perturb import map_tensors
from precision.free_benchmark.pieces import piece, piece_count
from precision.free_benchmark.rerun import Call, CannotRerunError, widen, widest
from precision.interception import tensors_in


class Fixer:
    """Makes calls in a wider precision and brings their results back to dtype and device of the call itself."""

    def __init__(self, config: FreeBenchmarkConfig) -> None:
        self._device = CPU if config.pert_mode == "to_cpu" else None
        self._dtypes: dict[Any, list[torch.dtype]] = {}

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The result to go on with, differentiable where the call is, and why it is the call's own; empty if it isn't.

        Args:
            args, kwargs: as the model gave them.
        """
        if call.in_place:
            return call.function(*args, **kwargs), "it works in place: the result would have to replace an input"
        key = (call.key, *(_kind(value) for value in (*args, *kwargs.values())), *(one.dtype for one in call.inputs))
        plain = None
        try:
            if key not in self._dtypes:
                # which dtypes it gives shows when it is made as it is, once
                plain = call.function(*args, **kwargs)
                call.done()
                self._dtypes[key] = [tensor.dtype for tensor in tensors_in(plain)]
            return self._better(call, self._dtypes[key]), ""
        except CannotRerunError as reason:
            if plain is None:
                call.rewind()
                plain = call.function(*args, **kwargs)
            return plain, str(reason)

    def _better(self, call: Call, dtypes: list[torch.dtype]) -> Any:
        target = widest((call.args, call.kwargs))
        if target is None or not dtypes:
            raise CannotRerunError(NO_FLOATS)
        count = piece_count(call.name, call.args)
        parts = [self._piece(call, number, count, target, dtypes) for number in range(count)]
        return parts[0] if count == 1 else torch.cat(parts, dim=-1)

    def _piece(self, call: Call, number: int, count: int, target: torch.dtype, dtypes: list[torch.dtype]) -> Any:
        cut = piece(call.name, number, count, call.args, call.kwargs)
        result = call.again_wider(*widen((cut.args, cut.kwargs), target, self._device))
        if len(list(tensors_in(result))) != len(dtypes):
            raise CannotRerunError("it gave another number of tensors the second time")
        rest = iter(dtypes)
        home = call.inputs[0].device

        def back(tensor: Tensor) -> Tensor:
            return tensor.to(device=home, dtype=next(rest))

        return map_tensors(result, back)


def _kind(value: Any) -> Any:
    """What of an argument decides the dtype of the result."""
    return value if isinstance(value, torch.dtype) else type(value)
