"""Level "graph" on an NPU: torchair's own dump options follow the debugger's, or the debugger says what they can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import tuned_model

from npu_tuned_model import GraphOptions, TuningOptions, UserError
from precision import PrecisionDebugger, PrecisionError

REPOSITORY = Path(__file__).resolve().parents[2]


def torchair_told(folder: Path, mode: str, **options: Any) -> dict[str, Any]:
    """What torchair_options.py prints on the simulated NPU."""
    script = [Path(__file__).with_name("torchair_options.py"), folder, mode, json.dumps(options)]
    command = [sys.executable, "-m", "npu_tuned_model.simulate", *map(str, script)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_ge_graphs_dump_follows_the_options(tmp_path: Path) -> None:
    options = {"data_mode": ["output"], "step": [0, "2-3"], "list": ["Mul", "Add_1"]}
    answer = torchair_told(tmp_path, "max-autotune", **options)
    told = {key.rpartition(".")[2]: value for key, value in answer["told"].items() if "ump" in key}
    assert told["enableDump"] == "1"
    assert told["dumpPath"] == str(tmp_path / "torchair" / "worldsize1_global_rank0")
    assert (told["dumpMode"], told["dumpData"]) == ("output", "stats")
    assert (told["dumpStep"], told["dumpLayer"]) == ("0|2|3", "Mul Add_1")
    assert answer["result"] == [2.0, 2.0, 2.0]
    assert f"torchair dumps its graphs to {tmp_path / 'torchair'}" in answer["summary"]


def test_a_captured_graphs_dump_takes_whole_tensors_only(tmp_path: Path) -> None:
    answer = torchair_told(tmp_path, "reduce-overhead", task="tensor")
    folder = str(tmp_path / "torchair" / "worldsize1_global_rank0")
    assert answer["told"]["aclgraph.enableDump"] == "1"
    assert answer["told"]["aclgraph.dumpPath"] == folder
    assert answer["saved"]
    assert all(path.startswith(folder) for path in answer["saved"])
    answer = torchair_told(tmp_path, "reduce-overhead", task="tensor", list=["Mul"])
    assert "torchair's dump has no list in mode reduce-overhead" in answer["error"]


class Option:
    """One of torchair's options, as far as set_dump_options looks at it."""

    value = "max-autotune"


class Config:
    mode = Option()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "L1"}, "level='graph'"),
        ({"task": "free_benchmark"}, "level='graph' and no other task"),
        ({"token_range": [0, 1]}, "no token_range"),
        ({"summary_mode": "md5"}, "no summary_mode"),
        ({"task": "structure"}, "no task 'structure'"),
        ({"data_mode": ["forward"]}, "doesn't tell forward from backward"),
    ],
)
def test_what_torchair_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tool = PrecisionDebugger(dump_path=tmp_path, quiet=True, **{"level": "graph", **options})
    with pytest.raises(PrecisionError, match=message.replace("'", ".")):
        tool.set_torchair_options(Config())


def test_the_tuned_models_graphs_take_it_where_torchair_compiles_them(checkpoints: Any, tmp_path: Path) -> None:
    tool = PrecisionDebugger(dump_path=tmp_path, level="graph", quiet=True)
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1], TuningOptions(native_kernels=False))
    with pytest.raises(UserError, match="configure_torchair is for torchair"):
        model.run_graph(GraphOptions(configure_torchair=tool.set_torchair_options))
