"""Determinism: the same tokens for a prompt from run to run, and whatever else is in its batch.

Kernels are picked by shape, and another kernel adds up in another order. So a prompt is prefilled alone, at its own
length, and decoded in groups whose size can't change a row's result: the C++ decode step (cpu_decode.py) computes each
row as if it were alone, other kernels get one row at a time.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from npu_tuned_model import cpu_kernels
from npu_tuned_model.cpu_decode import CpuDecode, why_no_cpu_decode
from npu_tuned_model.graph import EagerSteps
from npu_tuned_model.tuning import InForce

# Read when the libraries start: cuBLAS with one workspace per stream, HCCL with a fixed order of summing.
VARIABLES = {"cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "npu": {"HCCL_DETERMINISTIC": "true"}}


class SameStepsInEveryMode(EagerSteps):
    """Prefill as plain Python, decode as one C++ call: what runs on a CPU eager or compiled, when asked to be the same.

    A compiled prefill keeps sums in float32 that plain Python rounds to bfloat16.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cpu_decode = CpuDecode(model)


def same_steps_in_every_mode(model: Any) -> SameStepsInEveryMode | None:
    """Steps that give eager and graph mode the same result; None where there is no such decode step."""
    return SameStepsInEveryMode(model) if why_no_cpu_decode(model) is None else None


def rows_computed_alike(steps: Any) -> int:
    """How many rows a decode step may have without changing each other's results."""
    return cpu_kernels.FEW_ROWS if getattr(steps, "cpu_decode", None) is not None else 1


def make_deterministic(device: torch.device) -> None:
    """Tell torch and the device's libraries to be deterministic; before they compute anything."""
    for name, value in VARIABLES.get(device.type, {}).items():
        os.environ[name] = value
    torch.use_deterministic_algorithms(True)
    # would write to every new tensor for nothing: the model reads no unset memory
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def determinism_in_force(model: Any) -> InForce:
    """The row of the table "what is in force": what is promised here, and what isn't."""
    if not model.deterministic:
        return InForce("deterministic", False, False, "switched off")
    promise = "run to run and whatever the batch (same machine, versions and number of threads)"
    same = "eager and graph agree" if isinstance(model.steps, SameStepsInEveryMode) else "eager and graph may differ"
    return InForce("deterministic", True, True, f"{promise}; {same}")
