"""Python's garbage collector held still while tokens are generated.

A full collection walks every object of the process, transformers' and torch's many thousands included; between two
decode steps it is a pause that the device waits through. Reference counting goes on, so tensors are freed as always.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """No collection inside; everything that exists at the start is left out of later ones until the end."""
    if not gc.isenabled():
        # the caller, or an outer generation, has it in hand
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
