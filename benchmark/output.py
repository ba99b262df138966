"""Where a report goes: a folder that is tried out before the long run, and files that appear only when complete."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmark.html_report import render_html
from npu_tuned_model.errors import UserError

FILES = ("report.json", "report.html")
TRACE = "profile.json"
# about the size of the two files
_PROBE_BYTES = 512 * 1024


class OutputFolder:
    """The report's folder, made and tried out on construction.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path | None, *, force: bool = False) -> None:
        """
        Args:
            path: the folder, or None for a new benchmark_reports/YYYYmmdd-HHMMSS in the current one.
            force: whether an earlier report there may be overwritten.

        Raises:
            UserError: when it holds a report already, or can't be written.
        """
        self.path = path or Path("benchmark_reports") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        existing = [name for name in (*FILES, TRACE) if (self.path / name).exists()]
        if existing and not force:
            raise UserError(
                f"{self.path} holds {' and '.join(existing)} of an earlier run; pass --force to overwrite, or another "
                "--output_dir"
            )
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.path / ".probe", b"\0" * _PROBE_BYTES)
            (self.path / ".probe").unlink()
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, report: dict[str, Any]) -> list[Path]:
        """Write report.json and report.html; returns their paths.

        Raises:
            UserError: when they can't be written.
        """
        contents = (
            json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False).encode("utf-8"),
            render_html(report).encode("utf-8"),
        )
        try:
            for name, data in zip(FILES, contents):
                _write(self.path / name, data)
        except OSError as error:
            raise self._refusal(error) from error
        return [self.path / name for name in FILES]

    @property
    def trace(self) -> Path:
        """Where a profile goes."""
        return self.path / TRACE

    def discard(self) -> None:
        """After a run that failed: remove the folder if this object made it and nothing is in it."""
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _refusal(self, error: OSError) -> UserError:
        return UserError(
            f"the report can't be written to {self.path} ({error.strerror or error}); pass another --output_dir"
        )


def _write(path: Path, data: bytes) -> None:
    """The whole file or none of it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
