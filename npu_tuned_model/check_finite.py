"""Finding the first layer whose result is NaN or Inf."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from npu_tuned_model.errors import UserError


class FiniteCheck:
    """Context manager that stops a model at the first module whose result holds NaN or Inf, and names it.

    It looks at every module's result, inner modules before the ones around them, and reads each back from the device:
    for looking for a fault, not for timing. Works for any eager model; a compiled graph has no modules to look at.

    Raises:
        UserError: from the model's call, naming the module; and on entry, for a model that runs compiled graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> FiniteCheck:
        if getattr(getattr(self._model, "steps", None), "backend", None) is not None:
            raise UserError("NaN and Inf can only be traced to a layer in eager mode; call model.run_eager() first")
        for name, module in self._model.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(self._checker(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @staticmethod
    def _checker(name: str) -> Any:
        def check(module: nn.Module, args: Any, result: Any) -> None:
            for tensor in _tensors(result):
                if not bool(torch.isfinite(tensor).all()):
                    kind = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
                    dtype = str(tensor.dtype).replace("torch.", "")
                    raise UserError(
                        f"NaN or Inf in {name} ({type(module).__name__}): its result holds {kind} in {dtype}; "
                        "try bfloat16 or float32, and check that the checkpoint's weights are finite"
                    )

        return check


def _tensors(result: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned: a tensor, or tuples, lists and dicts of them."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _tensors(value)
