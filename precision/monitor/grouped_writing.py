"""Steps are written together: between two steps of a model the code and the folder's data have left the caches."""

from __future__ import annotations

import os
import time

from precision.monitor.console import Console
from precision.monitor.records import Scalar
from precision.monitor.writers import Rows, Writer

# Seconds that the figures of a step may wait for others; longer steps are written one by one.
LONGEST_WAIT = 1.0


class GroupedWriting:
    """Hands steps to the writers, the first at once and later ones together. A writer that fails is left out."""

    def __init__(self, writers: list[Writer], console: Console) -> None:
        self._writers = writers
        self._console = console
        self._waiting: list[tuple[int, Rows, list[Scalar]]] = []
        self._next_time = time.monotonic()
        self._process = os.getpid()

    @property
    def works(self) -> bool:
        """Whether any writer is left."""
        return bool(self._writers)

    def add(self, step: int, rows: Rows, scalars: list[Scalar]) -> None:
        """Take a step, and write when it is time."""
        self._waiting.append((step, rows, scalars))
        if time.monotonic() >= self._next_time:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if os.getpid() != self._process:
            # a fork's copy belongs to the parent
            return
        waiting, self._waiting = self._waiting, []
        for step, rows, scalars in waiting:
            for writer in list(self._writers):
                try:
                    writer.write(step, rows, scalars)
                except OSError as error:
                    self._writers.remove(writer)
                    self._console.note(f"no more figures are written after step {step}: {error.strerror or error}")
        self._next_time = time.monotonic() + LONGEST_WAIT

    def close(self) -> None:
        """Write what waits; nothing more will come."""
        self.flush()
        for writer in self._writers:
            writer.close()
