"""Comparing two dumps tensor by tensor."""

from precision.compare.comparison import Comparison, Row, compare_paths

__all__ = ["Comparison", "Row", "compare_paths"]
