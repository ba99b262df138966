"""Statistics of tensors in host memory by a C++ kernel that reads them once, built on demand.

torch's own kernels read a tensor four times, and bfloat16 through a copy in float32: 7 times slower.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from precision import cpp_library
from precision.dump import known_tensors

SOURCE = Path(__file__).with_name("host_statistics.cpp")
_FUNCTIONS = {torch.float32: "measure_float32", torch.bfloat16: "measure_bfloat16"}
# The doubles that a kernel writes: norm, smallest and largest element, mean, share of zeros, number of NaNs.
FIGURES = 6
# (address of the elements, their number, what is closer to zero counts as zero, address for the figures); False, and no
# figures, where not all elements are finite.
Kernel = Callable[[int, int, float, int], bool]


class HostFigures(NamedTuple):
    """What one pass over a tensor tells."""

    max: float
    min: float
    mean: float
    norm: float


def host_figures(values: Tensor) -> HostFigures | None:
    """The figures of a plain tensor of any shape, one element or more; None for what the kernel is not for.

    That is: memory that isn't on the host, dtypes other than float32 and bfloat16, values that are not all finite, and
    a machine where the kernel can't be built (see why_not).
    """
    kernel = kernels().get(values.dtype)
    if kernel is None or values.device.type not in known_tensors.HOST_DEVICES:
        return None
    if not _dense(values):
        # a copy, and still much faster than torch's kernels
        values = values.contiguous()
    figures = (ctypes.c_double * FIGURES)()
    if not kernel(values.data_ptr(), values.numel(), 0.0, ctypes.addressof(figures)):
        return None
    return HostFigures(max=figures[2], min=figures[1], mean=figures[3], norm=figures[0])


def why_not() -> str | None:
    """None when the kernel is there, else why it is not."""
    return cpp_library.why_not(SOURCE)


@functools.lru_cache(maxsize=1)
def kernels() -> dict[torch.dtype, Kernel]:
    """The kernel for each dtype that has one; none on a machine where they can't be built (see why_not)."""
    if why_not() is not None:
        return {}
    found = {}
    for dtype, name in _FUNCTIONS.items():
        function = getattr(cpp_library.load(SOURCE), name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p]
        function.restype = ctypes.c_bool
        found[dtype] = function
    return found


def _dense(values: Tensor) -> bool:
    # the order of the elements says nothing to the figures: transposed heads are as good
    if values.is_contiguous():
        return True
    extent = 1
    for stride, size in sorted(zip(values.stride(), values.shape)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True
