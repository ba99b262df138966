"""benchmark/deepspeed/benchmark_qwen.py under the real launcher: two ranks report, and no mistake or death hangs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmark.ranks import Ranks, check_single, read_single
from benchmark.sample_checkpoint import build
from npu_tuned_model import UserError
from npu_tuned_model.checkpoint_convert import Conversion

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("deepspeed") is None,
    reason="needs Linux and the deepspeed extra",
)
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmark" / "deepspeed" / "benchmark_qwen.py"
SHAPE = {
    "vocab_size": 321,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 300,
    "eos_token_id": 300,
}
SMALL = (
    "--device=cpu",
    "--execute_mode=eager",
    "--dtype=float32",
    "--batch_size=2",
    "--input_max_len=24",
    "--rounds=2",
)
HANG_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "tiny"
    build(folder, overrides=SHAPE)
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def launch(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={ranks}", f"--master_port={port}"]
    return subprocess.Popen(
        [*launcher, str(SCRIPT), *SMALL, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        raise
    return process.returncode, out


@pytest.fixture(scope="module")
def single_report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same workload on one rank."""
    folder = tmp_path_factory.mktemp("single")
    code, out = finish(launch(1, f"--model_path={model}", "--max_new_tokens=6", f"--output_dir={folder}"))
    assert code == 0, out
    return folder / "report.json"


def test_two_ranks_report_what_one_generates(model: Path, single_report: Path, tmp_path: Path) -> None:
    code, out = finish(
        launch(
            2,
            f"--model_path={model}",
            "--max_new_tokens=6",
            f"--output_dir={tmp_path / 'out'}",
            f"--single_report={single_report}",
        )
    )
    assert code == 0, out
    assert out.count("What is in force") == 1  # rank 0 alone reports
    report, single = (json.loads(path.read_text()) for path in (tmp_path / "out" / "report.json", single_report))
    assert report["sample_text"] == single["sample_text"]
    parallel = report["tensor_parallel"]
    assert parallel["ranks"] == 2
    assert len(parallel["peak_bytes_per_rank"]) == 2
    assert all(peak > 0 for peak in parallel["peak_bytes_per_rank"])
    # all but the norms are halved; of 321 rows of the vocabulary one rank holds one more
    assert sum(parallel["weight_bytes_per_rank"]) == single["memory"]["weights_bytes"] + 5 * 64 * 4
    for step, tokens in (("prefill", 48), ("decode", 2)):
        assert parallel[step]["bytes"] == tokens * 64 * 4
        assert parallel[step]["count"] == 5
        assert parallel[step]["all_reduce_ms"]["median"] > 0
        expected = single["variants"]["tuned"]["summary"][f"{step}_ms"]["median"]
        expected /= 2 * report["variants"]["tuned"]["summary"][f"{step}_ms"]["median"]
        assert parallel["linearity"][step] == pytest.approx(expected)
    assert "linearity, decode" in out
    assert single["tensor_parallel"] is None


def test_a_rank_that_is_killed_ends_the_job(model: Path, tmp_path: Path) -> None:
    job = launch(2, f"--model_path={model}", "--max_new_tokens=4000", f"--output_dir={tmp_path / 'out'}", "--rounds=50")
    assert job.stdout is not None
    for line in job.stdout:
        if "Warming up" in line:
            break
    time.sleep(1)  # into the generation
    ranks = [
        child
        for child in psutil.Process(job.pid).children(recursive=True)
        if any(part.startswith("--local_rank") for part in child.cmdline()) and str(SCRIPT) in child.cmdline()
    ]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    code, _ = finish(job, timeout_s=HANG_S)
    assert code != 0
    _, alive = psutil.wait_procs(ranks, timeout=HANG_S)
    assert alive == []
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_mistake_is_a_line_and_an_exit_code(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "for four"
    Conversion(model, folder, tp_size=4, max_shard_bytes=10**9).write()
    code, out = finish(launch(2, f"--model_path={folder}", f"--output_dir={tmp_path / 'out'}"))
    assert code != 0
    assert "was converted for tp_size 4, this run has tp_size 2" in out
    assert "Traceback" not in out
    assert not (tmp_path / "out").exists()


def test_without_a_launcher_it_says_how_to_start(model: Path) -> None:
    outside = {name: value for name, value in environment().items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, f"--model_path={model}"],
        env=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "deepspeed --num_gpus=N benchmark/deepspeed/benchmark_qwen.py" in run.stderr
    assert run.stderr.count("\n") == 1


# the report of one rank


def test_a_report_of_another_workload_is_refused(single_report: Path) -> None:
    single = read_single(single_report)
    check_single(single, {**single["model"], "path": "elsewhere"}, single["workload"])
    with pytest.raises(UserError, match="is of another workload: batch_size 2 there, 3 here"):
        check_single(single, single["model"], {**single["workload"], "batch_size": 3})
    with pytest.raises(UserError, match="is of another model: dtype 'float32' there, 'bfloat16' here"):
        check_single(single, {**single["model"], "dtype": "bfloat16"}, single["workload"])


@pytest.mark.parametrize("content", ["", "{}", "[]", None])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"is no report of this benchmark|is not JSON|can.t be read"):
        read_single(path)


def test_a_report_of_several_ranks_is_refused(single_report: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**json.loads(single_report.read_text()), "tensor_parallel": {"ranks": 2}}))
    with pytest.raises(UserError, match="is of a run on 2 ranks; give one of a single rank"):
        read_single(path)


def test_one_process_is_the_whole_model() -> None:
    assert (Ranks().size, Ranks().shard) == (1, (0, 1))
    assert Ranks().gather(7) == [7]
