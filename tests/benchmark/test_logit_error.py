"""benchmark/logit_error.py as a user runs it: in float32 nobody is far from stock; mistakes are a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmark.logit_error import main

VARIANTS = [
    "stock eager",
    "stock sdpa",
    *(f"tuned {mode}, {step}" for mode in ("eager", "graph") for step in ("prefill", "decode")),
]


def test_every_variant_is_held_against_float32(tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["the sea is calm today", "x", "a much longer text about the sea and the wind"]))
    outcome = CliRunner().invoke(
        main, [f"--model_path={tiny_checkpoint}", "--device=cpu", "--dtype=float32", f"--prompts={prompts}"]
    )
    assert outcome.exit_code == 0, outcome.output
    lines = [line for line in outcome.output.splitlines() if "mean |logit error|" in line]
    assert [line.split("mean")[0].strip() for line in lines] == VARIANTS
    for line in lines:
        assert "mean |logit error| 0.0000   top-1 agreement 1.0000" in line


@pytest.mark.parametrize(
    ("option", "words"), [("--prompts=missing.json", "missing.json"), ("--model_path=nowhere", "nowhere")]
)
def test_a_mistake_is_one_line(tiny_checkpoint: Path, option: str, words: str) -> None:
    outcome = CliRunner().invoke(main, [f"--model_path={tiny_checkpoint}", option])
    assert outcome.exit_code != 0
    assert words in outcome.output
    assert outcome.output.count("\n") == 1
