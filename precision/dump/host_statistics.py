"""Statistics of tensors in host memory by a C++ kernel that reads them once, built on demand.

torch's own kernels read a tensor four times, and bfloat16 through a copy in float32: 7 times slower.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precision import cpp_library
from precision.dump import known_tensors

SOURCE = Path(__file__).with_name("host_statistics.cpp")
_FUNCTIONS = {torch.float32: "measure_float32", torch.bfloat16: "measure_bfloat16"}


class HostFigures(NamedTuple):
    """What one pass over a tensor tells."""

    max: float
    min: float
    sum: float
    norm: float


def host_figures(values: Tensor) -> HostFigures | None:
    """The figures of a plain tensor of any shape, one element or more; None for what the kernel is not for.

    That is: memory that isn't on the host or has gaps, dtypes other than float32 and bfloat16, values that are not all
    finite, and a machine where the kernel can't be built (see why_not).
    """
    name = _FUNCTIONS.get(values.dtype)
    if (
        name is None
        or values.device.type not in known_tensors.HOST_DEVICES
        or not _dense(values)
        or why_not() is not None
    ):
        return None
    figures = (ctypes.c_double * 4)()
    getattr(_library(), name)(values.data_ptr(), values.numel(), figures)
    if not math.isfinite(figures[3]):
        return None
    return HostFigures(figures[0], figures[1], figures[2], math.sqrt(figures[3]))


def why_not() -> str | None:
    """None when the kernel is there, else why it is not."""
    return cpp_library.why_not(SOURCE)


def _dense(values: Tensor) -> bool:
    # the order of the elements says nothing to the figures: a transposed tensor is as good
    return values.is_contiguous() or (values.dim() == 2 and values.t().is_contiguous())


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    loaded = cpp_library.load(SOURCE)
    for name in _FUNCTIONS.values():
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        function.restype = None
    return loaded
