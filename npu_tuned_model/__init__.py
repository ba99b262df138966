"""Qwen2, tuned for Ascend NPUs; the same code runs and is tested on CPUs and GPUs.

The names below are imported when they are first used: the commands that look after a broken stack (doctor, simulate)
are part of this package and must start where torch itself can't be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from npu_tuned_model.version import __version__

if TYPE_CHECKING:
    from npu_tuned_model.errors import CheckpointError, UserError
    from npu_tuned_model.graph import GraphOptions
    from npu_tuned_model.load import load_model
    from npu_tuned_model.modeling_qwen2 import Qwen2ForCausalLM
    from npu_tuned_model.tuning import TuningOptions

_HOME = {
    "CheckpointError": "errors",
    "GraphOptions": "graph",
    "Qwen2ForCausalLM": "modeling_qwen2",
    "TuningOptions": "tuning",
    "UserError": "errors",
    "load_model": "load",
}

__all__ = [
    "CheckpointError",
    "GraphOptions",
    "Qwen2ForCausalLM",
    "TuningOptions",
    "UserError",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
