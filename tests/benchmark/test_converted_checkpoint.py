"""The benchmark of one card takes a checkpoint converted for one rank, and nothing else that is converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import run_command

from npu_tuned_model.checkpoint_convert import Conversion

SMALL = ("--execute_mode=eager", "--dtype=float32", "--input_max_len=8", "--max_new_tokens=2", "--rounds=1")


@pytest.fixture
def converted(tiny_checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    Conversion(tiny_checkpoint, tmp_path / "converted", tp_size=request.param, max_shard_bytes=10**9).write()
    return tmp_path / "converted"


@pytest.mark.parametrize("converted", [1], indirect=True)
def test_one_made_for_one_rank_runs(converted: Path, tmp_path: Path) -> None:
    outcome = run_command(f"--model_path={converted}", *SMALL, f"--output_dir={tmp_path / 'out'}")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["tensor_parallel"] is None


@pytest.mark.parametrize("converted", [1], indirect=True)
def test_stock_cannot_be_compared_on_it(converted: Path) -> None:
    outcome = run_command(f"--model_path={converted}", *SMALL, "--compare=stock")
    assert outcome.code != 0
    assert "stock transformers can't read the converted checkpoint" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("converted", [2], indirect=True)
def test_one_made_for_two_ranks_is_refused(converted: Path, tmp_path: Path) -> None:
    outcome = run_command(f"--model_path={converted}", *SMALL, f"--output_dir={tmp_path / 'out'}")
    assert outcome.code != 0
    assert "was converted for tp_size 2, this run has tp_size 1:" in outcome.err
    assert not (tmp_path / "out").exists()
