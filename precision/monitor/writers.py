"""Where figures go: CSV files as msprobe names them, TensorBoard."""

from __future__ import annotations

import csv
import io
import os
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

from precision.errors import PrecisionError
from precision.monitor.alerts import Alert
from precision.monitor.config import MonitorConfig
from precision.monitor.records import MICRO_STEP_KINDS, SCALAR_KINDS, Record, Scalar
from precision.monitor.statistics import OPS
from precision.output import probe

DEFAULT_FOLDER = "monitor_output"
ALERT_COLUMNS = Alert._fields
Rows = list[tuple[Record, list[float]]]


class Writer(Protocol):
    """Takes the figures of one step after another."""

    def write(self, step: int, rows: Rows, scalars: list[Scalar]) -> None:
        """Write a step; raises OSError when that fails."""

    def close(self) -> None:
        """Nothing more will come."""


def make_folder(output_dir: str | os.PathLike[str] | None, rank: int) -> Path:
    """<output_dir>/<Mon><dd>_<HH-MM-SS>-rank<R>-<8 hex>, tried out.

    Args:
        output_dir: None for $MONITOR_OUTPUT_DIR, or ./monitor_output.
        rank: of this process.

    Raises:
        PrecisionError: when it can't be written.
    """
    root = Path(output_dir or os.environ.get("MONITOR_OUTPUT_DIR") or DEFAULT_FOLDER)
    folder = root / f"{time.strftime('%b%d_%H-%M-%S')}-rank{rank}-{uuid.uuid4().hex[:8]}"
    try:
        probe(folder)
    except OSError as error:
        raise PrecisionError(
            f"the monitor can't write to {root} ({error.strerror or error}); choose another output_dir"
        ) from error
    return folder


def make_writers(folder: Path, config: MonitorConfig) -> list[Writer]:
    """The writers of config.format.

    Raises:
        PrecisionError: for TensorBoard without its package.
    """
    writers: list[Writer] = []
    if config.format != "tensorboard":
        writers.append(CsvWriter(folder, list(config.ops), config.ndigits, config.step_count_per_record))
    if config.format != "csv":
        writers.append(TensorBoardWriter(folder, list(config.ops)))
    return writers


class CsvWriter:
    """<kind>_<first step>-<last step>.csv with a row per tensor and step."""

    def __init__(self, folder: Path, ops: list[str], ndigits: int, steps_per_file: int) -> None:
        self._folder = str(folder)
        self._ops = ops
        self._steps_per_file = steps_per_file
        self._places = [OPS.index(op) for op in ops]
        self._digits = f"%.{ndigits}g"
        self._format = ",".join([self._digits] * len(ops))
        # what is the same in every row of a tensor
        self._ends: dict[Any, str] = {}

    def write(self, step: int, rows: Rows, scalars: list[Scalar]) -> None:
        """Append to the step's files."""
        lines: dict[str, list[str]] = {}
        places, form = self._places, self._format
        everything = self._ops == list(OPS)
        for record, figures in rows:
            kind = record.kind
            if kind in SCALAR_KINDS:
                text = f"{record.vpp_stage},{_quoted(record.name)},{step},{self._digits % figures[0]}"
            else:
                end = self._ends.get((record.shape, record.dtype)) or self._end(record)
                micro = f",{record.micro_step}" if kind in MICRO_STEP_KINDS else ""
                shown = form % tuple(figures if everything else [figures[place] for place in places])
                text = f"{record.vpp_stage},{_quoted(record.name)},{step}{micro},{shown},{end}"
            try:
                lines[kind].append(text)
            except KeyError:
                lines[kind] = [text]
        for scalar in scalars:
            lines.setdefault(scalar.kind, []).append(f"0,{_quoted(scalar.name)},{step},{self._digits % scalar.value}")
        first = step // self._steps_per_file * self._steps_per_file
        for kind, texts in lines.items():
            self._append(f"{self._folder}/{kind}_{first}-{first + self._steps_per_file - 1}.csv", kind, texts)

    def close(self) -> None:
        """Files are complete after each write."""

    def _end(self, record: Record) -> str:
        shape = str(list(record.shape))
        text = f'"{shape}",{record.dtype}' if "," in shape else f"{shape},{record.dtype}"
        self._ends[(record.shape, record.dtype)] = text
        return text

    def _append(self, path: str, kind: str, texts: list[str]) -> None:
        # a text file would cost as much again as the rest of it
        with open(path, "ab") as file:
            head = ",".join(self._columns(kind)) + "\n" if file.tell() == 0 else ""
            file.write((head + "\n".join(texts) + "\n").encode())

    def _columns(self, kind: str) -> list[str]:
        if kind in SCALAR_KINDS:
            return ["vpp_stage", "name", "step", "value"]
        micro = ["micro_step"] if kind in MICRO_STEP_KINDS else []
        return ["vpp_stage", "name", "step", *micro, *self._ops, "shape", "dtype"]


class TensorBoardWriter:
    """<kind>/<name>/<figure> as scalars over the steps."""

    def __init__(self, folder: Path, ops: list[str]) -> None:
        """
        Raises:
            PrecisionError: without the tensorboard package.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PrecisionError(
                "format tensorboard needs the package tensorboard (pip install tensorboard); format csv doesn't"
            ) from error
        self._ops = [(op, OPS.index(op)) for op in ops]
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, rows: Rows, scalars: list[Scalar]) -> None:
        """Add the step's points; of several forward passes per step each has its own curve."""
        for record, figures in rows:
            name = f"{record.kind}/{record.vpp_stage}:{record.name}"
            if record.kind in SCALAR_KINDS:
                self._writer.add_scalar(name, figures[0], step)
                continue
            micro = f"/micro{record.micro_step}" if record.micro_step else ""
            for op, place in self._ops:
                self._writer.add_scalar(f"{name}{micro}/{op}", figures[place], step)
        for scalar in scalars:
            self._writer.add_scalar(f"{scalar.kind}/0:{scalar.name}", scalar.value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class AlertFile:
    """alerts.csv, with a line per alert as soon as it is found."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "alerts.csv"

    def write(self, alerts: list[Alert]) -> None:
        """Append alerts; raises OSError when that fails."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self.path.exists():
            writer.writerow(ALERT_COLUMNS)
        writer.writerows(alerts)
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


def _quoted(name: str) -> str:
    return name if not any(mark in name for mark in ',"\n') else '"' + name.replace('"', '""') + '"'
