"""python -m npu_tuned_model.simulate: runs a script as python would, says what it is first, and passes its exit on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 300,
    "eos_token_id": 300,
}


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_tuned_model.simulate", *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)


def test_inside() -> None:
    """Everything that is tested on the simulated device itself."""
    result = simulate("--devices=2", "-m", "pytest", "-o", "addopts=", "-q", "tests/simulate/inside")
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-4000:]}"
    assert " passed" in result.stdout.splitlines()[-1]


def test_a_script_gets_its_arguments_its_devices_and_its_exit_status(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from beside import NAME\n"
        "assert __name__ == '__main__'\n"
        "print(sys.argv[1:], NAME, torch.npu.device_count(), torch.npu.get_device_name(1))\n"
        "print((torch.ones(2, device='npu:1') + 1).tolist())\n"
        "sys.exit(7)\n"
    )
    result = simulate("--devices", 3, "--soc", "Ascend310P3", script, "--devices", "x")
    assert result.returncode == 7, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first.startswith("Simulated NPU: a development tool.")
    assert "no figure is a performance figure" in first
    assert second == "['--devices', 'x'] beside 3 Ascend310P3"
    assert third == "[2.0, 2.0]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no script was given"),
        (("-m",), "no script was given"),
        (("nowhere.py",), "nowhere.py is no file"),
        (("--devices=0", "Makefile"), "0 simulated devices"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = simulate(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "tiny"
    build = f"build(Path({str(folder)!r}), overrides={TINY})"
    code = f"from pathlib import Path; from benchmark.sample_checkpoint import build; {build}"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    return folder


@pytest.mark.parametrize("mode", ["eager", "dynamo"])
def test_the_benchmark_runs_end_to_end_and_says_that_it_was_simulated(
    checkpoint: Path, tmp_path: Path, mode: str
) -> None:
    result = simulate(
        "benchmark/npu/benchmark_qwen.py",
        "--device=npu",
        f"--model_path={checkpoint}",
        f"--execute_mode={mode}",
        "--compare=stock",
        *("--batch_size=2", "--input_max_len=24", "--max_new_tokens=6", "--rounds=1"),
        f"--output_dir={tmp_path / 'report'}",
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["environment"]["simulated"]
    assert report["environment"]["device"].startswith("simulated Ascend910B3")
    assert report["notes"][0].startswith("the NPU is simulated")
    assert report["comparison"]["prefill"] is None
    assert "times as fast" not in result.stdout
    assert "simulated, no performance figures" in result.stdout
    assert "simulated, no performance figures" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert all(pair["equal_share"] == 1.0 for pair in report["comparison"]["tokens"].values())
    assert {row["name"] for row in report["in_force"] if row["active"]} >= {"nz_weights", "frozen_gc", "fused_rope"}
    if mode == "dynamo":
        nodes = {row["name"]: row["why"] for row in report["in_force"] if row["name"].startswith("graph_nodes")}
        assert nodes["graph_nodes_prefill"].startswith("per layer: 16 (public: 43)")
        assert nodes["graph_nodes_decode"].startswith("per layer: 16 (public: 37)")
        assert report["execution"]["graphs"] == {"prefill": 1, "decode": 1}
        assert report["execution"]["graphs_after_warm_up"] == 0
        shown = [line for line in result.stdout.splitlines() if line.startswith("simulated NPU: GE graph")]
        assert len(shown) == 2
        assert "PromptFlashAttention 2" in shown[0]
        assert "IncreFlashAttention 2" in shown[1]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
def test_two_ranks_meet_over_hccl(checkpoint: Path, tmp_path: Path) -> None:
    """The model divided between two NPUs, the sums nodes of the GE graph, generates what one CPU does."""
    on_cpu = (sys.executable, "benchmark/npu/benchmark_qwen.py", "--device=cpu", "--execute_mode=eager")
    text, _ = _run_benchmark(on_cpu, checkpoint, tmp_path / "cpu")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    script = ("-m", "npu_tuned_model.simulate", "--devices=2", "benchmark/deepspeed/benchmark_qwen.py", "--device=npu")
    divided_text, output = _run_benchmark((*launcher, *meeting, *script), checkpoint, tmp_path / "npus")
    assert divided_text == text
    assert "HcomAllReduce 6" in output
    report = json.loads((tmp_path / "npus" / "report.json").read_text(encoding="utf-8"))
    assert report["environment"]["simulated"]
    assert report["tensor_parallel"]["ranks"] == 2
    assert report["tensor_parallel"]["all_reduce"] == "hccl"


def _run_benchmark(command: tuple[str, ...], checkpoint: Path, output: Path) -> tuple[str, str]:
    """The text it generates, and what it prints."""
    options = [f"--model_path={checkpoint}", f"--output_dir={output}", "--dtype=float32"]
    options += ["--batch_size=2", "--input_max_len=24", "--max_new_tokens=6", "--rounds=1"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    result = subprocess.run([*command, *options], cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    return report["sample_text"], result.stdout
