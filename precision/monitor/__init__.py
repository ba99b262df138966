"""Watches a model while it trains or generates, cheap enough to leave on."""

from precision.monitor.config import MonitorConfig
from precision.monitor.monitor import Monitor
from precision.monitor.targets import print_struct

__all__ = ["Monitor", "MonitorConfig", "print_struct"]
