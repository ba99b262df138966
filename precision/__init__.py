"""Precision tools for any nn.Module: dump what it computes, compare two dumps."""

from precision.config import Config
from precision.debugger import PrecisionDebugger
from precision.errors import PrecisionError

__all__ = ["Config", "PrecisionDebugger", "PrecisionError"]
