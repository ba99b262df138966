"""Two reports side by side."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_run import REPOSITORY

from benchmark.compare_reports import differences, main, ratios


@pytest.fixture
def two_reports(finished_report: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    second = copy.deepcopy(finished_report)
    second["environment"]["torch_threads"] += 5
    second["in_force"][0].update(active=False, why="switched off")
    for value in second["variants"]["tuned"]["summary"].values():
        if value:
            value.update({key: 2 * figure for key, figure in value.items()})
    second["execution"]["first_call_s"] = {"prefill": 99.0}
    return finished_report, second


def test_only_conditions_that_differ_are_named(two_reports: Any) -> None:
    first, second = two_reports
    assert differences(first, first) == []
    threads = str(first["environment"]["torch_threads"]), str(second["environment"]["torch_threads"])
    assert differences(first, second) == [
        ("environment.torch_threads", *threads),
        ("in force: fixed_kv_cache", "yes", "no, switched off"),
    ]


def test_ratios_are_the_second_over_the_first(two_reports: Any) -> None:
    rows = ratios(*two_reports)
    assert {row[4] for row in rows if row[0] == "tuned"} == {"2.00"}
    assert {row[4] for row in rows if row[0] != "tuned"} == {"1.00"}


def test_command_line(two_reports: Any, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, report in zip(files, two_reports):
        file.write_text(json.dumps(report))
    command = [sys.executable, "-m", "benchmark.report", *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert "fixed_kv_cache" in result.stdout
    assert "2.00" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "can't be read"), ("{", "is not JSON"), ("[1]", "is no report of this benchmark")],
)
def test_files_that_are_no_reports(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(main, [str(file), str(file)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
