"""Qwen2, tuned for Ascend NPUs; the same code runs and is tested on CPUs and GPUs."""

from npu_tuned_model.errors import CheckpointError, UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.load import load_model
from npu_tuned_model.modeling_qwen2 import Qwen2ForCausalLM
from npu_tuned_model.tuning import TuningOptions
from npu_tuned_model.version import __version__

__all__ = [
    "CheckpointError",
    "GraphOptions",
    "Qwen2ForCausalLM",
    "TuningOptions",
    "UserError",
    "__version__",
    "load_model",
]
