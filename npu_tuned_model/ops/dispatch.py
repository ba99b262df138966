"""Which implementation serves a tensor."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import ascend, portable


def backend(tensor: Tensor) -> ModuleType:
    """ascend for a tensor on an NPU, portable for any other; torch.compile folds the choice to a constant."""
    return ascend if tensor.device.type == "npu" else portable
