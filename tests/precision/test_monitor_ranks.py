"""Two ranks: gradients before and after their reduction, faults of one rank, under DDP and DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from monitor_runs import assert_row, read
from monitor_two_ranks import NAN_STEP, STEPS

from precision.monitor.page import find_runs, read_alerts

SCRIPT = Path(__file__).with_name("monitor_two_ranks.py")


def run_ranks(cases: str, out: Path) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, cases, str(out)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks("ddp,ddp_buckets,nan,ranks", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks("deepspeed0,deepspeed1,deepspeed2", tmp_path_factory.mktemp("deepspeed"))


def check(out: Path) -> None:
    norms = []
    for rank in range(2):
        saved = torch.load(out / f"rank{rank}.pt", weights_only=True)
        folder = Path(saved["folder"])
        assert f"-rank{rank}-" in folder.name
        checked = set()
        for kind in ("grad_unreduced", "grad_reduced", "exp_avg", "exp_avg_sq"):
            for row in read(folder, kind):
                key = f"{kind}/{row['name']}/{row['step']}"
                assert_row(row, saved["tensors"][key])
                checked.add(key)
        assert checked == set(saved["tensors"])
        assert {row["step"] for row in read(folder, "actv")} == {str(step) for step in range(STEPS)}
        assert read(folder, "actv_grad")
        norms.append([row["norm"] for row in read(folder, "grad_unreduced")])
    assert norms[0] != norms[1]


@pytest.mark.parametrize("case", ["ddp", "ddp_buckets"])
def test_gradients_before_and_after_the_reduction(case: str, ddp: Path) -> None:
    check(ddp / case)


def test_a_nan_of_one_rank_is_named_with_rank_module_and_step(ddp: Path) -> None:
    alerts = read_alerts(find_runs(ddp / "nan"))
    first = alerts[0]
    assert (first.rank, first.step, first.kind, first.name) == (1, NAN_STEP, "actv", "branches.left.output")
    assert first.module == "branches.left"
    # the other rank gets it with the reduced gradients
    others = [alert for alert in alerts if alert.rank == 0]
    assert (others[0].step, others[0].kind) == (NAN_STEP, "grad_reduced")


def test_only_the_ranks_that_are_asked_for_write(ddp: Path) -> None:
    runs = find_runs(ddp / "ranks")
    assert ["-rank1-" in run.name for run in runs] == [True]


@pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("deepspeed") is None,
    reason="needs Linux and the deepspeed extra",
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed(stage: int, deepspeed: Path) -> None:
    check(deepspeed / f"deepspeed{stage}")
