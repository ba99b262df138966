"""C++ kernels for tensors in host memory: compiled when first needed, kept for the next process.

Whoever uses one does without it, more slowly, where it can't be built (see why_not).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

# Only comparisons take finite values for granted; sums of squares show those that aren't.
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffinite-math-only", "-fno-signed-zeros", "-fno-trapping-math")


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library made of a C++ file, once per machine and source.

    Raises:
        subprocess.CalledProcessError, OSError: when it can't be built or loaded.
    """
    return ctypes.CDLL(str(_built(source)))


@functools.cache
def why_not(source: Path) -> str | None:
    """None when the library is there, else why it is not."""
    try:
        load(source)
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "stderr", None) or str(error)
        complaint = next((line for line in output.splitlines() if "error" in line), output.strip()[:200])
        return f"the C++ kernel {source.name} could not be built ({complaint})"
    return None


def _built(source: Path) -> Path:
    from torch.utils import cpp_extension

    command = [os.environ.get("CXX", "g++"), *_FLAGS, str(source)]
    made_of = source.read_bytes() + repr((command, platform.machine())).encode()
    folder = Path(cpp_extension.get_default_build_root()) / "precision"
    target = folder / f"{source.stem}_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            unfinished = Path(temporary) / target.name
            subprocess.run([*command, "-o", str(unfinished)], check=True, capture_output=True, text=True)
            unfinished.replace(target)
    return target
