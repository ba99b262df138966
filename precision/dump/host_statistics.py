"""Statistics of tensors in host memory by a C++ kernel that reads them once, built on demand.

torch's own kernels read a tensor four times, and bfloat16 through a copy in float32: 7 times slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precision.dump import known_tensors

SOURCE = Path(__file__).with_name("host_statistics.cpp")
# Only the comparisons take finite values for granted; the sum of squares shows those that aren't.
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffinite-math-only", "-fno-signed-zeros", "-fno-trapping-math")
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
    getattr(library(), name)(values.data_ptr(), values.numel(), figures)
    if not math.isfinite(figures[3]):
        return None
    return HostFigures(figures[0], figures[1], figures[2], math.sqrt(figures[3]))


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """None when the kernel is there, else why it is not; builds it, once per machine and source."""
    try:
        library()
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "stderr", None) or str(error)
        complaint = next((line for line in output.splitlines() if "error" in line), output.strip()[:200])
        return f"the C++ kernel of the statistics could not be built ({complaint})"
    return None


def _dense(values: Tensor) -> bool:
    # the order of the elements says nothing to the figures: a transposed tensor is as good
    return values.is_contiguous() or (values.dim() == 2 and values.t().is_contiguous())


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The built kernel.

    Raises:
        subprocess.CalledProcessError, OSError: when it can't be built or loaded.
    """
    loaded = ctypes.CDLL(str(_built()))
    for name in _FUNCTIONS.values():
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        function.restype = None
    return loaded


def _built() -> Path:
    from torch.utils import cpp_extension

    command = [os.environ.get("CXX", "g++"), *_FLAGS, str(SOURCE)]
    made_of = SOURCE.read_bytes() + repr((command, platform.machine())).encode()
    folder = Path(cpp_extension.get_default_build_root()) / "precision"
    target = folder / f"host_statistics_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            unfinished = Path(temporary) / target.name
            subprocess.run([*command, "-o", str(unfinished)], check=True, capture_output=True, text=True)
            unfinished.replace(target)
    return target
