"""The tuned model under free-benchmark: its operators count as APIs, in eager code, in graphs and on several ranks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import precision_checks
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import tuned_model

from npu_tuned_model import TuningOptions
from precision import PrecisionDebugger

SHAPE = "gqa_4_2_head_16"
OPERATORS = {"NPU.npu_rms_norm", "NPU.npu_add_rms_norm", "NPU.npu_swiglu", "NPU.npu_apply_rotary_pos_emb"}
ATTENTION = {"NPU.npu_prompt_flash_attention", "NPU.npu_incre_flash_attention", "NPU.scatter_update_"}


def rows(folder: Path, who: str = "rank") -> list[dict[str, str]]:
    with open(folder / "step0" / who / "free_benchmark_calls.csv") as file:
        return list(csv.DictReader(file))


def checked(found: list[dict[str, str]]) -> set[str]:
    return {row["api_name"].rpartition(".")[0] for row in found if row["verdict"] != "not checked"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu", "no_change", "bit_noise", "change_value"])
def test_the_tuned_models_operators_are_checked_in_eager_mode(
    tmp_path: Path, checkpoints: Any, mode: str, dtype: str
) -> None:
    # the C++ kernels are for graphs and take long to build
    model = tuned_model(checkpoints[SHAPE][1], TuningOptions(native_kernels=False), dtype)
    ids = torch.arange(2, 26).view(2, 12)
    plain = precision_checks.run_tuned(model, ids, ids[:, :2])
    tool = PrecisionDebugger(dump_path=tmp_path, task="free_benchmark", pert_mode=mode, quiet=True)
    precision_checks.register_ops(tool, model)
    with tool.start(model):
        seen = precision_checks.run_tuned(model, ids, ids[:, :2])
    assert torch.equal(plain, seen)
    found = rows(tmp_path)
    assert checked(found) >= OPERATORS | ATTENTION
    assert [row for row in found if row["verdict"] not in ("ok", "not checked")] == []
    assert all(row["reason"] for row in found if row["verdict"] == "not checked")


def test_the_tuned_models_graphs_are_checked_node_by_node(tmp_path: Path, checkpoints: Any) -> None:
    torch.compiler.reset()
    model = tuned_model(checkpoints[SHAPE][1])
    tool = PrecisionDebugger(dump_path=tmp_path, task="free_benchmark", level="graph", quiet=True)
    steps: Any = precision_checks.EagerSteps(model)
    backend = tool.compile_backend("eager")
    steps.prefill = torch.compile(steps.prefill, backend=backend, fullgraph=True, dynamic=False)
    steps.decode = torch.compile(steps.decode, backend=backend, fullgraph=True, dynamic=False)
    ids = torch.arange(2, 26).view(2, 12)
    plain = precision_checks.run_tuned(model, ids, ids[:, :1])
    with precision_checks._steps(model, steps), tool.start(model):
        seen = precision_checks.run_tuned(model, ids, ids[:, :1])
    torch.testing.assert_close(plain, seen)
    found = rows(tmp_path)
    assert len([row for row in found if row["verdict"] == "ok"]) > 40
    assert [row for row in found if row["verdict"] not in ("ok", "not checked")] == []
    assert any("layers.1" in row["module"] for row in found)


def _rank(rank: int, folder: Path, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", pert_mode="no_change", quiet=True)
        with tool.start():
            values = torch.ones(4).mul(rank + 1)
            dist.all_reduce(values)
        assert values.tolist() == [3.0] * 4
    finally:
        dist.destroy_process_group()


def test_every_rank_writes_its_report_and_collectives_run_once(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    mp.spawn(_rank, args=(folder, f"file://{tmp_path / 'store'}"), nprocs=2)
    for rank in range(2):
        found = {row["api_name"]: row for row in rows(folder, f"rank{rank}")}
        assert {row["rank"] for row in found.values()} == {str(rank)}
        assert found["Tensor.__mul__.0"]["verdict"] == "ok"
        assert "a collective runs once" in found["Distributed.all_reduce.0"]["reason"]
