"""Fixtures: a tiny checkpoint with a tokenizer, and finished runs on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

# the benchmark is no installed package: it runs from the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tiny_run import TINY, Outcome, run_command

from benchmark.sample_checkpoint import build


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests that damage it take a copy."""
    folder = tmp_path_factory.mktemp("sample") / "tiny"
    build(folder, overrides=TINY)
    return folder


@pytest.fixture(scope="session")
def small_run(tiny_checkpoint: Path) -> Callable[..., Outcome]:
    """The command on the tiny checkpoint with a workload of a second; more options may follow."""

    def run(*arguments: object) -> Outcome:
        small = ("--batch_size=2", "--input_max_len=24", "--max_new_tokens=4", "--rounds=2", "--dtype=float32")
        return run_command(f"--model_path={tiny_checkpoint}", *small, *arguments)

    return run


@pytest.fixture(scope="session")
def finished_report(small_run: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """report.json of an eager run with stock beside it and the ablation; copy before changing."""
    folder = tmp_path_factory.mktemp("report")
    outcome = small_run("--execute_mode=eager", "--compare=stock", "--ablation", f"--output_dir={folder}")
    assert outcome.code == 0, outcome.err
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))
