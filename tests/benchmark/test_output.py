"""Reports are written whole, never over an earlier one unasked, and a bad folder is found before the long run."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark.output import OutputFolder
from npu_tuned_model.errors import UserError


def test_both_files_are_written_and_nothing_else(tmp_path: Path, finished_report: dict[str, Any]) -> None:
    output = OutputFolder(tmp_path / "new" / "folder")
    files = output.write(finished_report)
    assert sorted(file.name for file in output.path.iterdir()) == ["report.html", "report.json"]
    assert json.loads(files[0].read_text(encoding="utf-8")) == finished_report


def test_default_is_a_new_folder_named_by_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = OutputFolder(None)
    assert re.fullmatch(r"benchmark_reports/\d{8}-\d{6}", output.path.as_posix())
    assert output.path.is_dir()


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_an_earlier_report_is_kept_unless_forced(tmp_path: Path, name: str, finished_report: dict[str, Any]) -> None:
    (tmp_path / name).write_text("earlier")
    with pytest.raises(UserError, match=f"{name} of an earlier run; pass --force"):
        OutputFolder(tmp_path)
    OutputFolder(tmp_path, force=True).write(finished_report)
    assert (tmp_path / name).read_text(encoding="utf-8") != "earlier"


@pytest.mark.parametrize("place", ["below_a_file", "proc"])
def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "reports" if place == "below_a_file" else Path("/proc/reports")
    with pytest.raises(UserError, match="can't be written to") as error:
        OutputFolder(folder)
    assert "\n" not in str(error.value)


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_found_at_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        OutputFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_later_keeps_the_earlier_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_report: dict[str, Any]
) -> None:
    (tmp_path / "report.json").write_text("earlier")
    output = OutputFolder(tmp_path, force=True)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        output.write(finished_report)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "earlier"


def test_after_a_failed_run_only_an_empty_folder_of_its_own_goes_away(tmp_path: Path) -> None:
    OutputFolder(tmp_path / "made").discard()
    assert not (tmp_path / "made").exists()
    (tmp_path / "there").mkdir()
    OutputFolder(tmp_path / "there").discard()
    assert (tmp_path / "there").is_dir()
    output = OutputFolder(tmp_path / "used")
    (tmp_path / "used" / "note").write_text("")
    output.discard()
    assert (tmp_path / "used" / "note").exists()
