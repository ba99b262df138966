"""The table of heaviest operators: from a profiler's trace on this machine, and from what an NPU's profiler leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmark import operator_profile
from benchmark.operator_profile import check_profiler, heaviest, profile, read_npu_statistics
from npu_tuned_model.errors import UserError

CPU = torch.device("cpu")


def test_a_matmul_is_the_heaviest(tmp_path: Path) -> None:
    left = torch.randn(400, 400)

    def run() -> None:
        for _ in range(5):
            (left @ left).add_(1)

    rows = profile(run, CPU, tmp_path / "trace.json")
    assert rows[0]["operator"] == "aten::mm"
    assert rows[0]["calls"] == 5
    assert rows[0]["ms"] > rows[1]["ms"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_ten_by_time_with_their_share_of_all() -> None:
    rows = heaviest([(f"op{number}", 1, float(number)) for number in range(20)])
    assert [row["operator"] for row in rows] == [f"op{number}" for number in range(19, 9, -1)]
    assert rows[0]["share"] == 19 / 190
    assert heaviest([("idle", 1, 0.0)])[0]["share"] == 0.0


def test_the_statistics_of_an_npu(tmp_path: Path) -> None:
    folder = tmp_path / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    folder.mkdir(parents=True)
    (folder / "op_statistic.csv").write_text(
        "Device_id,OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)\n"
        "0,AddRmsNorm,AI_VECTOR_CORE,48,250.5,5,5.2,6,20\n"
        "0,MatMulV2,AI_CORE,96,1002.0,10,10.4,12,80\n"
    )
    rows = read_npu_statistics(tmp_path)
    assert [(row["operator"], row["calls"], row["ms"]) for row in rows] == [
        ("MatMulV2", 96, 1.002),
        ("AddRmsNorm", 48, 0.2505),
    ]
    assert rows[0]["share"] == pytest.approx(0.8)


def test_no_statistics(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"left no op_statistic\.csv"):
        read_npu_statistics(tmp_path)


def test_a_simulated_npu_has_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profile, "is_simulated", lambda device: True)
    with pytest.raises(UserError, match="needs an NPU"):
        check_profiler(CPU)
