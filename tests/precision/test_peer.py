"""msprobe's compare accepts two of our dumps, row for row, and ours reads two of msprobe's."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import Net
from peer import run_with_peer

from precision import PrecisionDebugger
from precision.compare import compare_paths

COMPARE = """
import sys
from msprobe.msprobe import main
target, golden, output = sys.argv[1:]
sys.argv = ["msprobe", "compare", "-tp", target, "-gp", golden, "-o", output]
main()
"""

DUMP = f"""
import json, sys
sys.path.append({str(Path(__file__).parent)!r})
import torch
from modules import Net
from msprobe.pytorch import PrecisionDebugger
name, shift = sys.argv[1], float(sys.argv[2])
part = {{"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}}
config = {{"task": "tensor", "dump_path": name, "rank": [], "step": [], "level": "mix", "tensor": part}}
json.dump(config, open(name + ".json", "w"))
debugger = PrecisionDebugger(config_path=name + ".json")
model = Net()
with torch.no_grad():
    model.head.bias += shift
debugger.start(model=model)
model(torch.ones(2, 4, requires_grad=True)).sum().backward()
debugger.stop()
debugger.step()
"""


def dump(folder: Path, **options: Any) -> Path:
    tool, model = PrecisionDebugger(dump_path=folder, quiet=True, level="mix", **options), Net()
    x = torch.ones(2, 4, requires_grad=True)
    with tool.start(model):
        result = model(x)
        # what JSON and msprobe's name checks could stumble over
        (result / torch.zeros(3)).masked_fill(result > 0, float("-inf"))
        result.to(torch.bfloat16) + 1
        torch.tensor([True, False]).logical_not()
        torch.empty(0, 2).abs()
        torch.tensor(3).add(1)
        result.sum().backward()
    return folder / "step0" / "rank" / "dump.json"


@pytest.mark.parametrize("options", [{"summary_mode": "md5"}, {"task": "tensor"}, {"task": "tensor", "compress": True}])
def test_the_peer_accepts_every_row_of_ours(options: dict[str, Any], tmp_path: Path) -> None:
    target, golden = dump(tmp_path / "a", **options), dump(tmp_path / "b", **options)
    run_with_peer(COMPARE, str(target), str(golden), "out", folder=tmp_path)
    (result,) = (tmp_path / "out").glob("compare_result*.csv")
    with result.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    ours = compare_paths(golden.parent, target.parent)
    # its rows are our tensors and, in addition, the plain arguments
    assert {row.target for row in ours.rows} <= {row["NPU Name"] for row in rows}
    assert [row["NPU Name"] for row in rows] == [row["Bench Name"] for row in rows]
    assert {row["Result"] for row in rows} <= {"pass", "Pass"}
    assert ours.passed


def test_ours_reads_the_peers(tmp_path: Path) -> None:
    run_with_peer(DUMP, "a", "0", folder=tmp_path)
    run_with_peer(DUMP, "b", "0.5", folder=tmp_path)
    comparison = compare_paths(tmp_path / "a", tmp_path / "b")
    assert comparison.notes == []
    assert comparison.counts["unmatched"] == comparison.counts["unknown"] == 0
    different = {row.address for row in comparison.rows if row.verdict == "different"}
    assert different == {"head", "head/linear", "/sum"}
    assert all(row.errors is not None for row in comparison.rows)
    # what it recorded is what we record, under names that our compare brings together
    tool, model = PrecisionDebugger(dump_path=tmp_path / "ours", quiet=True, level="mix", task="tensor"), Net()
    with tool.start(model):
        x = torch.ones(2, 4, requires_grad=True)
        model(x).sum().backward()
    matched = compare_paths(tmp_path / "a", tmp_path / "ours")
    # torch's own wrapper hands layer_norm's weight and bias on by keyword, where msprobe sees them by position
    alone = {row.golden for row in matched.rows if row.golden and not row.target}
    assert alone == {f"Functional.layer_norm.0.forward.input.{place}" for place in (2, 3)}
    # msprobe lists linear's input gradients in the order of autograd's node (bias, input, transposed weight)
    order = {f"Functional.linear.{call}.backward.output.{place}" for call in range(2) for place in range(3)}
    assert {row.target for row in matched.rows if row.verdict == "different"} == order
    # without the files the statistics are compared
    for folder in tmp_path.glob("*/step0/*/dump_tensor_data"):
        shutil.rmtree(folder)
    statistics = compare_paths(tmp_path / "a", tmp_path / "b")
    assert {row.address for row in statistics.rows if row.verdict == "different"} == different
