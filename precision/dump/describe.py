"""What a record says of an argument or a result: msprobe's JSON form of tensors and plain values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import torch
from torch import Tensor

# Describes one tensor, given the suffix that its file would have.
DescribeTensor = Callable[[Tensor, str], Any]


def describe(value: Any, place: str, tensor: DescribeTensor) -> Any:
    """The JSON form of a value, nested as it is.

    Args:
        place: where the value stands in the record, such as "input.0".
        tensor: called for each tensor with its place.
    """
    if isinstance(value, Tensor):
        return tensor(value, place)
    if value is None:
        return None
    kind = type(value)
    if kind in (bool, int, float, str):
        return {"type": kind.__name__, "value": strict_number(value)}
    if isinstance(value, (list, tuple)):
        return [describe(entry, f"{place}.{index}", tensor) for index, entry in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): describe(entry, f"{place}.{key}", tensor) for key, entry in value.items()}
    if isinstance(value, (torch.dtype, torch.device, torch.Size, slice)):
        return {"type": kind.__name__, "value": str(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {
            name: describe(entry, f"{place}.{name}", tensor)
            for name, entry in fields.items()
            if isinstance(entry, Tensor)
        }
    return {"type": kind.__name__, "value": f"<{kind.__name__}>"}


def as_sequence(result: Any) -> tuple[Any, ...]:
    """A call's result as a record lists it: one entry per element of a tuple or list, else one."""
    return tuple(result) if isinstance(result, (tuple, list)) and not hasattr(result, "_fields") else (result,)


def strict_number(value: Any) -> Any:
    """A figure as strict JSON can hold it: NaN becomes null (it is counted beside)."""
    return None if isinstance(value, float) and math.isnan(value) else value
