"""When a step's figures reach the files: the first step's at once, later ones together, and none are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from monitor_runs import Net, batches, read

from precision.monitor import Monitor, grouped_writing

ROOT = Path(__file__).resolve().parents[2]
ENDS_WITHOUT_CLOSE = """
import sys
import torch
from precision.monitor import Monitor

model = torch.nn.Linear(2, 2)
monitor = Monitor(output_dir=sys.argv[1], page=False, step_count_per_record=9, all_xy=True).watch(model)
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(1, 2))
raise ValueError("the run ends here")
"""


def steps_in(folder: Path | None) -> set[int]:
    assert folder is not None
    return {int(row["step"]) for row in read(folder, "actv")}


@pytest.mark.parametrize("wait", [0.0, 3600.0])
def test_short_steps_wait_for_others(wait: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_writing, "LONGEST_WAIT", wait)
    model = Net()
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, all_xy=True)
    with monitor.watch(model), torch.no_grad():
        for batch in batches(3):
            model(batch)
        assert steps_in(monitor.folder) == ({0} if wait else {0, 1, 2})
    assert steps_in(monitor.folder) == {0, 1, 2}


def test_an_alert_brings_everything_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_writing, "LONGEST_WAIT", 3600.0)
    model = Net()
    rules = {"rules": [{"rule_name": "AnomalyNan"}]}
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, all_xy=True, alert=rules)
    with monitor.watch(model), torch.no_grad():
        for batch in (*batches(2), torch.full((5, 4), torch.nan)):
            model(batch)
        assert steps_in(monitor.folder) == {0, 1, 2}


def test_a_run_that_ends_without_close_leaves_all_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stderr.rstrip().endswith("ValueError: the run ends here")
    assert steps_in(next(tmp_path.iterdir())) == {0, 1, 2}


def test_a_forks_copy_isnt_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    class Writer:
        def write(self, step: int, rows: object, scalars: object) -> None:
            written.append(step)

        def close(self) -> None:
            pass

    monkeypatch.setattr(grouped_writing, "LONGEST_WAIT", 3600.0)
    writing = grouped_writing.GroupedWriting([Writer()], console=None)  # type: ignore[arg-type]
    writing.add(0, [], [])
    writing.add(1, [], [])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    writing.flush()
    assert written == [0]
    monkeypatch.undo()
    writing.flush()
    assert written == [0, 1]
