"""What becomes of a step's figures: files, alerts, a dump of the step after an alert, a line on the console."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque

import torch
from torch import nn

from precision.debugger import PrecisionDebugger
from precision.errors import PrecisionError
from precision.monitor import page
from precision.monitor.alerts import Alert, Alerts, first
from precision.monitor.collector import Step
from precision.monitor.config import MonitorConfig
from precision.monitor.console import Console, status_line
from precision.monitor.grouped_writing import GroupedWriting
from precision.monitor.writers import AlertFile, Rows, make_folder, make_writers

# Steps whose figures may be on their way from a device.
IN_FLIGHT = 2
# Options that decide which columns a file has, which are the same in all its rows.
_LAYOUT = ("ops", "ndigits", "format", "step_count_per_record")


class Results:
    """Takes one step after another, until close(). What fails after its start never stops the run that is watched.

    Attributes:
        folder: where the figures are; another one after the files' columns have changed.
        alerts: all so far.
        steps: how many were taken.
    """

    def __init__(
        self,
        config: MonitorConfig,
        output_dir: str | os.PathLike[str] | None,
        rank: int,
        models: list[nn.Module],
        debugger: PrecisionDebugger | None,
        console: Console,
    ) -> None:
        """
        Args:
            models: what is dumped after an alert.
            debugger: what dumps it; one that dumps modules to <folder>/dump without it.

        Raises:
            PrecisionError: for a folder that can't be written, and format tensorboard without the package.
        """
        self._config = config
        self._output_dir = output_dir
        self._rank = rank
        self._models = models
        self._debugger = debugger
        self._console = console
        self._dumping = self._dumped = False
        self._pending: deque[Step] = deque()
        self._rules = Alerts(config.alert.rules, rank)
        self.alerts: list[Alert] = []
        self.steps = 0
        self._open()

    @property
    def needs(self) -> set[str]:
        """Figures that are to be computed."""
        return set(self._config.ops) | self._rules.needs

    def take_over(self, config: MonitorConfig) -> None:
        """Go on with other options.

        Raises:
            PrecisionError: as on construction.
        """
        before, self._config = self._config, config
        if config.alert != before.alert:
            self._rules = Alerts(config.alert.rules, self._rank)
        if any(getattr(config, key) != getattr(before, key) for key in _LAYOUT):
            self._files.close()
            self._open()

    def add(self, step: Step) -> None:
        """Take a step whose figures may be on their way."""
        self._pending.append(step)
        self.steps += 1

    def write_ready(self, next_step: int) -> None:
        """Take in the steps whose figures have arrived, and wait for those of long ago.

        Args:
            next_step: number of the step that is about to begin, which is dumped after an alert.
        """
        before = len(self.alerts)
        while self._pending and (self._pending[0].ready or len(self._pending) >= IN_FLIGHT):
            self._arrived(self._pending.popleft())
        if len(self.alerts) > before and self._config.alert.dump and not self._dumped:
            self._dumped = True
            self._dump(next_step)

    def stop_dump(self) -> None:
        """The step that is dumped is over."""
        if self._dumping and self._debugger is not None:
            self._dumping = False
            try:
                self._debugger.stop()
            except PrecisionError as error:
                self._console.note(f"the step after the alert isn't dumped: {error}")

    def close(self) -> list[str]:
        """Write what is left and the page; returns the summary."""
        self.stop_dump()
        while self._pending:
            self._arrived(self._pending.popleft())
        self._files.close()
        lines = [f"{self.steps} steps collected, {len(self.alerts)} alerts, figures in {self.folder}"]
        found = first(self.alerts)
        if found is not None:
            lines.append(f"first alert: {found}")
        if self._config.page and self._files.works and self._config.format != "tensorboard":
            try:
                lines.append(f"page: {page.write_page([self.folder], self.folder / 'monitor.html')}")
            except OSError as error:
                lines.append(f"the page can't be written ({error.strerror or error})")
        return lines

    def _dump(self, number: int) -> None:
        if self._debugger is None:
            self._debugger = PrecisionDebugger(dump_path=self.folder / "dump", level="L0", quiet=True)
        try:
            self._debugger.set_init_step(number)
            self._debugger.start(self._models if len(self._models) > 1 else self._models[0])
            self._dumping = True
        except PrecisionError as error:
            self._console.note(f"the next step isn't dumped: {error}")

    def _open(self) -> None:
        self.folder = make_folder(self._output_dir, self._rank)
        self._files = GroupedWriting(make_writers(self.folder, self._config), self._console)
        # for a run that ends without close()
        weakref.finalize(self, self._files.flush)

    def _arrived(self, step: Step) -> None:
        rows = step.rows()
        self._files.add(step.number, rows, step.scalars)
        if self._rules:
            self._check(step, rows)
        if self._config.live:
            print(status_line(step, rows, len(self.alerts)), file=sys.stderr, flush=True)

    def _check(self, step: Step, rows: Rows) -> None:
        new: list[Alert] = []
        for place, (record, figures) in enumerate(rows):
            new += self._rules.check(
                step.number, place, record.kind, record.name, record.micro_step, figures, record.shape
            )
        for scalar in step.scalars:
            figures = [scalar.value, *[float("nan")] * 5]
            new += self._rules.check(step.number, 0, scalar.kind, scalar.name, 0, figures, torch.Size(()))
        if not new:
            return
        if not self.alerts:
            self._console.show([f"alert: {first(new)}"])
        self.alerts += new
        self._files.flush()
        if self._files.works:
            try:
                AlertFile(self.folder).write(new)
            except OSError as error:
                self._console.note(f"alerts can't be written ({error.strerror or error})")
