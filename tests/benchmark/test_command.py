"""The command: whole runs on a tiny checkpoint, and one clear line with a non-zero exit for every bad input."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import REPOSITORY, TINY, Outcome, run_command

from benchmark import sample_checkpoint
from benchmark.ablation import STAGES

SCRIPT = REPOSITORY / "benchmark" / "npu" / "benchmark_qwen.py"
Run = Callable[..., Outcome]


def assert_refused(outcome: Outcome, *parts: str) -> None:
    assert outcome.code != 0
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err


@pytest.fixture
def damaged(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_eager_with_stock_beside_it(finished_report: dict[str, Any]) -> None:
    report = finished_report
    assert report["execution"]["mode"] == "eager"
    assert report["workload"]["prompt_tokens_per_row"] == [16, 15]
    tokens = report["comparison"]["tokens"]
    assert set(tokens) == {
        "tuned against stock eager",
        "tuned against stock sdpa",
        "stock sdpa against stock eager",
    }
    # float32 and planted successors: rounding doesn't decide
    assert all(entry["equal_share"] == 1.0 for entry in tokens.values())
    for step in ("prefill", "decode"):
        assert report["comparison"][step]["against"] in ("stock eager", "stock sdpa")
        assert len(report["comparison"][step]["ratio_per_round"]) == 2
    assert {row["name"]: row["active"] for row in report["in_force"]}["fixed_kv_cache"]
    assert report["memory"]["weights_bytes"] > 0
    assert report["memory"]["kv_cache_bytes"] > 0


def test_eager_ablation_goes_from_stock_to_everything(finished_report: dict[str, Any]) -> None:
    rows = finished_report["ablation"]
    assert [row["optimisation"] for row in rows[:3]] == [
        "stock eager",
        "stock sdpa",
        "tuned code, everything off",
    ]
    assert len(rows) == 3 + len(STAGES)
    assert all(row["graph"] is None for row in rows)
    for step in ("prefill", "decode"):
        assert all(row["eager"][f"{step}_ms"]["min"] > 0 for row in rows)
        # each row beside the one above it, so the first has no gain
        assert rows[0]["eager"][f"{step}_gain"] is None
        assert all(row["eager"][f"{step}_gain"]["min"] > 0 for row in rows[1:])


def test_graph_mode_compiles_two_graphs_and_none_later(small_run: Run, tmp_path: Path) -> None:
    outcome = small_run("--execute_mode=dynamo", f"--output_dir={tmp_path}", "--check_finite")
    assert outcome.code == 0, outcome.err
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["execution"]["mode"] == "inductor"
    assert report["execution"]["graphs"] == {"prefill": 1, "decode": 1}
    assert report["execution"]["graphs_after_warm_up"] == 0
    assert all(report["execution"]["first_call_s"][step] > 0 for step in ("prefill", "decode"))
    assert report["comparison"] is None
    assert "none after warm-up" in " ".join(outcome.out.split())
    assert any("no NaN or Inf" in note for note in report["notes"])


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_deterministic_run_with_a_profile(small_run: Run, tmp_path: Path, torch_as_before: None) -> None:
    outcome = small_run("--execute_mode=eager", "--deterministic", "--profile", f"--output_dir={tmp_path}")
    assert outcome.code == 0, outcome.err
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (row,) = [row for row in report["in_force"] if row["name"] == "deterministic"]
    assert row["active"]
    assert torch.are_deterministic_algorithms_enabled()
    assert 0 < len(report["profile"]) <= 10
    assert "Heaviest operators" in outcome.out
    events = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {entry["operator"] for entry in report["profile"]} <= {event["name"] for event in events}
    assert "Heaviest operators" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert_refused(small_run(f"--output_dir={tmp_path}"), "profile.json of an earlier run")


def test_without_a_compiler_it_says_so_and_runs_eager(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.runner.has_cpp_compiler", lambda: False)
    outcome = small_run("--execute_mode=dynamo", f"--output_dir={tmp_path}")
    assert outcome.code == 0, outcome.err
    assert "install g++" in " ".join(outcome.out.split())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["execution"]["asked"] == "dynamo"
    assert report["execution"]["mode"] == "eager"


def test_without_a_model_path_a_sample_is_built_and_stock_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sample_checkpoint, "CONFIG", {**sample_checkpoint.CONFIG, **TINY})
    monkeypatch.chdir(tmp_path)
    outcome = run_command("--execute_mode=eager", "--input_max_len=24", "--max_new_tokens=3", "--rounds=1")
    assert outcome.code == 0, outcome.err
    assert "Building a sample checkpoint" in outcome.out
    assert "random weights" in outcome.out
    assert "tuned against stock eager" in outcome.out
    (written,) = (tmp_path / "benchmark_reports").glob("*/report.json")
    report = json.loads(written.read_text(encoding="utf-8"))
    assert report["model"]["random_weights"] is True
    assert report["sample_text"] is None


def test_prompts_longer_than_the_limit_are_cut_with_a_warning(small_run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("short\n" + "long " * 10 + "\n")
    outcome = small_run("--execute_mode=eager", f"--prompts={tmp_path}/prompts.txt", f"--output_dir={tmp_path}/out")
    assert outcome.code == 0, outcome.err
    assert "prompt 2 has 50 tokens: 26 were cut" in " ".join(outcome.out.split())


def test_one_new_token_runs(small_run: Run, tmp_path: Path) -> None:
    outcome = small_run("--execute_mode=eager", "--max_new_tokens=1", "--compare=stock", f"--output_dir={tmp_path}")
    assert outcome.code == 0, outcome.err
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["comparison"]["decode"] is None
    assert report["variants"]["tuned"]["rounds"][0]["decode_ms"] is None


def test_an_earlier_report_is_refused_before_anything_is_loaded(small_run: Run, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("earlier")
    outcome = small_run(f"--output_dir={tmp_path}")
    assert_refused(outcome, "report.json of an earlier run", "--force")
    assert "Loading" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model_path=/no/such/folder"], ["/no/such/folder"]),
        (["--batch_size=0"], ["--batch_size", "0"]),
        (["--batch_size=two"], ["--batch_size", "two"]),
        (["--input_max_len=-3"], ["--input_max_len"]),
        (["--max_new_tokens=0"], ["--max_new_tokens"]),
        (["--rounds=0"], ["--rounds"]),
        (["--dtype=float8"], ["float8", "bfloat16"]),
        (["--device=tpu"], ["tpu", "cuda"]),
        (["--execute_mode=fast"], ["fast", "dynamo"]),
        (["--compare=everything"], ["everything", "stock"]),
        (["--no_such_option"], ["--no_such_option"]),
        (["--input_max_len=150", "--max_new_tokens=20"], ["context of 160"]),
        (["--prompts=/no/such/prompts.txt"], ["/no/such/prompts.txt"]),
        (["--output_dir=/proc/report"], ["/proc/report"]),
    ],
)
def test_bad_options(small_run: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(small_run(*arguments), *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(small_run: Run) -> None:
    assert_refused(small_run("--device=cuda"), "--device=cuda", "--device=cpu")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_no_torch_npu(small_run: Run) -> None:
    assert_refused(small_run("--device=npu"), "torch_npu", "--device=cpu")


def test_a_config_that_is_not_qwen2(small_run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert_refused(small_run(f"--model_path={damaged}"), "llama")


def test_a_truncated_weight_file(small_run: Run, damaged: Path, tmp_path: Path) -> None:
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    outcome = small_run(f"--model_path={damaged}", f"--output_dir={tmp_path}/out")
    assert_refused(outcome, "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard(small_run: Run, damaged: Path, tmp_path: Path) -> None:
    weights = load_file(str(damaged / "model.safetensors"))
    (damaged / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    save_file({name: weights[name] for name in parts["model-1.safetensors"]}, str(damaged / "model-1.safetensors"))
    weight_map = {name: file for file, listed in parts.items() for name in listed}
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    outcome = small_run(f"--model_path={damaged}", f"--output_dir={tmp_path}/out")
    assert_refused(outcome, "model-2.safetensors")


def test_a_prompt_beyond_the_context(small_run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("x" * 500)
    assert_refused(small_run(f"--prompts={tmp_path}/prompts.txt"), "500 tokens", "context is 160")


def test_an_adapter_is_merged_or_refused(small_run: Run, tmp_path: Path) -> None:
    arguments = ["--execute_mode=eager", f"--lora={tmp_path}", f"--output_dir={tmp_path / 'out'}"]
    outcome = small_run("--compare=stock", *arguments)
    assert_refused(outcome, "--lora changes the tuned model only", "--compare=none")
    assert_refused(small_run(*arguments, "--compare=none"), "is no LoRA adapter")


def test_weights_that_are_not_finite_are_named(small_run: Run, damaged: Path, tmp_path: Path) -> None:
    weights = load_file(str(damaged / "model.safetensors"))
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, str(damaged / "model.safetensors"), metadata={"format": "pt"})
    outcome = small_run(f"--model_path={damaged}", "--check_finite", f"--output_dir={tmp_path}/out")
    assert_refused(outcome, "model.layers.1.mlp.down_proj", "NaN")


def test_a_full_disk(small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    outcome = small_run(f"--output_dir={tmp_path}/out")
    assert_refused(outcome, "No space left on device")
    assert "Loading" not in outcome.out


def run_script(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_script_lists_its_options_from_any_folder(tmp_path: Path) -> None:
    done = run_script("--help", cwd=tmp_path)
    assert done.returncode == 0
    for option in ("model_path", "execute_mode", "device", "dtype", "batch_size", "input_max_len", "max_new_tokens"):
        assert f"--{option}" in done.stdout
    for option in ("prompts", "ablation", "compare", "output_dir", "rounds", "check_finite", "force"):
        assert f"--{option}" in done.stdout


def test_script_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = run_script("--model_path=/no/such/folder", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "benchmark_reports").exists()


def test_script_runs(tmp_path: Path, tiny_checkpoint: Path) -> None:
    done = run_script(
        f"--model_path={tiny_checkpoint}",
        "--execute_mode=eager",
        "--input_max_len=24",
        "--max_new_tokens=3",
        "--rounds=1",
        "--output_dir=out",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["environment"]["gomp_spincount"] == os.environ.get("GOMP_SPINCOUNT", "20000")
