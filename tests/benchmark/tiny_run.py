"""A checkpoint small enough for tests, and the command run in this process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmark.npu.benchmark_qwen import main

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 300,
    "eos_token_id": 300,
}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run_command(*arguments: object) -> Outcome:
    """The command line in this process: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main.main([str(argument) for argument in arguments])
    code = stop.value.code
    return Outcome(code if isinstance(code, int) else 1, out.getvalue(), err.getvalue())
