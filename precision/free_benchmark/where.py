"""The module that the current call was made in, found from the Python frames: no hook on any module is needed."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

# Frames looked at: an API's call is a few frames away from the forward that makes it.
DEPTH = 24


class ModulePaths:
    """The dotted names of the modules of one or several models."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._paths: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            for path, module in model.named_modules():
                self._paths.setdefault(id(module), f"{prefix}{path}".rstrip("."))

    def current(self) -> str:
        """The innermost known module whose method is running; empty when there is none."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(DEPTH):
            if frame is None:
                break
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self":
                path = self._paths.get(id(frame.f_locals["self"]) if "self" in frame.f_locals else 0)
                if path is not None:
                    return path
            frame = frame.f_back
        return ""
