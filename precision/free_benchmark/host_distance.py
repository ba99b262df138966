"""The distance of two results in host memory by a C++ kernel that reads each once (see distance.py)."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precision import cpp_library
from precision.dump.known_tensors import HOST_DEVICES

SOURCE = Path(__file__).with_name("host_distance.cpp")
_FUNCTIONS = {
    (torch.bfloat16, torch.bfloat16): "distance_bfloat16_bfloat16",
    (torch.bfloat16, torch.float32): "distance_bfloat16_float32",
    (torch.float32, torch.float32): "distance_float32_float32",
}


class Rules(ctypes.Structure):
    """How a distance is measured.

    Attributes:
        block: elements of a block.
        floor, tiny: what is added to a block's norm: this share of the mean block's, or at least tiny.
        huge: what is larger is as good as infinite.
    """

    _fields_ = (
        ("block", ctypes.c_int64),
        ("floor", ctypes.c_double),
        ("tiny", ctypes.c_double),
        ("huge", ctypes.c_float),
    )


class HostGap(NamedTuple):
    """
    Attributes:
        apart, size: L2 norms of the difference and of the second tensor.
        worst: largest of any block's difference, relative to the block and the floor.
        alike: whether both sides are numbers in the same places; only then the rest is known.
    """

    apart: float
    size: float
    worst: float
    alike: bool


def host_gap(ours: Tensor, theirs: Tensor, rules: Rules) -> HostGap | None:
    """The gap between two contiguous tensors of as many elements, one or more.

    None for what the kernel is not for: memory that isn't on the host, other dtypes than bfloat16 and float32, and a
    machine where it can't be built.
    """
    name = _FUNCTIONS.get((ours.dtype, theirs.dtype))
    if name is None or not _plain(ours) or not _plain(theirs) or cpp_library.why_not(SOURCE) is not None:
        return None
    gap = (ctypes.c_double * 4)()
    getattr(_library(), name)(ours.data_ptr(), theirs.data_ptr(), ours.numel(), ctypes.byref(rules), gap)
    return HostGap(math.sqrt(gap[0]), math.sqrt(gap[1]), gap[2], bool(gap[3]))


def _plain(values: Tensor) -> bool:
    return values.device.type in HOST_DEVICES and values.layout == torch.strided and not values.is_neg()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    loaded = cpp_library.load(SOURCE)
    for name in _FUNCTIONS.values():
        function = getattr(loaded, name)
        pointer = ctypes.c_void_p
        function.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.POINTER(Rules), pointer]
        function.restype = None
    return loaded
