"""The regression over nine model families: every row runs, checks something and cries wolf nowhere."""

from __future__ import annotations

import csv
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from precision import PrecisionDebugger
from precision.free_benchmark import baseline
from precision.free_benchmark.baseline import main, settings
from precision.free_benchmark.baseline_models import FAMILIES, VideoTransformer
from precision.free_benchmark.baseline_peer import Peer, peer_config

MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_checked_and_is_healthy(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make().bfloat16().eval()
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in family.batch(16).items()}
    rows = settings(family.apis)
    own = [key for key in rows if family.apis and "+".join(family.apis) in key]
    for number, setting in enumerate([*(f"check all {mode}" for mode in MODES), "fix all improve_precision", *own]):
        tool = PrecisionDebugger(dump_path=tmp_path / str(number), task="free_benchmark", quiet=True, **rows[setting])
        with torch.no_grad(), tool.start(model):
            model(**batch)
        summary: Any = tool.summary
        done = summary.checked + summary.replaced
        assert done > 5, str(summary)
        assert sum(summary.flagged.values()) <= 0.02 * done, str(summary)


def test_the_video_transformer_has_the_seeds_counts() -> None:
    model = VideoTransformer()
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 257
    assert sum(hasattr(module, "qkv") for module in model.modules()) == 83


def test_the_command_writes_its_table(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    arguments = ["--models", "LLaMA2", "--tokens", "8", "--rounds", "1", "--only", "linear", "--output", str(output)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    with open(output) as file:
        rows = list(csv.DictReader(file))
    assert [row["setting"] for row in rows] == [key for key in settings(()) if "linear" in key]
    assert all(int(row["checked"]) == 15 and float(row["time"]) > 0 for row in rows)
    assert all(int(row["rounds"]) == 1 and 1.0 <= float(row["memory"]) < 2.0 for row in rows)
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code != 0
    assert "--force" in again.output


def test_a_settings_whole_name_chooses_it_alone_and_no_setting_is_one_line() -> None:
    arguments = ["--models", "LLaMA2", "--tokens", "8", "--rounds", "1"]
    names = ["check all no_change", "check softmax no_change"]
    result = CliRunner().invoke(main, [*arguments, "--only", names[0], "--only", names[1]])
    assert result.exit_code == 0, result.output
    assert [line[16:].partition("  ")[0] for line in result.output.splitlines()] == names[::-1]
    result = CliRunner().invoke(main, [*arguments, "--only", "sotfmax"])
    assert result.exit_code != 0
    assert "sotfmax" in result.output


def test_a_slow_setting_makes_fewer_rounds_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "PATIENCE", 0.0)
    arguments = ["--models", "LLaMA2", "--tokens", "8", "--rounds", "3", "--only", "check nothing matched"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert ") in 1 " in result.output


def test_an_unknown_model_names_those_there_are() -> None:
    result = CliRunner().invoke(main, ["--models", "GPT9"])
    assert result.exit_code != 0
    assert "LLaMA2" in result.output


def test_without_the_peer_its_row_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msprobe", None)
    result = CliRunner().invoke(main, ["--models", "LLaMA2", "--peer"])
    assert result.exit_code != 0
    assert "mindstudio-probe==8.3.3" in result.output


def test_the_peer_gets_what_it_has_a_setting_for() -> None:
    rows = {name: peer_config(options) for name, options in settings(()).items()}
    known = rows["check linear to_cpu"]
    assert known is not None
    assert (known["list"], known["pert_mode"], known["fuzz_device"]) == (["linear"], "to_cpu", "cpu")
    unknown = ("rotate", "round_mode", "condition", "backward all")
    assert [name for name, row in rows.items() if row is None] == [
        name for name in rows if any(word in name for word in unknown)
    ]


def test_the_peers_hooks_are_off_between_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of msprobe: stop() leaves torch's functions wrapped, and a debugger is made once."""
    done: list[str] = []
    hooks = SimpleNamespace(
        register_all_api=lambda: done.append("wrapped"), restore_all_api=lambda: done.append("restored")
    )

    class Debugger:
        _instance: Any = None

        def __new__(cls, config_path: str) -> Any:
            cls._instance = cls._instance or super().__new__(cls)
            return cls._instance

        def __init__(self, config_path: str) -> None:
            self.service = SimpleNamespace(api_register=hooks)

        def start(self, model: nn.Module) -> None:
            done.append("start")

        def stop(self) -> None:
            done.append("stop")

    monkeypatch.setattr("precision.free_benchmark.baseline_peer.import_peer", lambda: Debugger)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    first, second = Peer(tmp_path, {}), Peer(tmp_path, {})
    assert first._tool is not second._tool
    with second.start(nn.Identity()):
        done.append("step")
    assert done == ["start", "wrapped", "step", "stop", "restored"]


def test_steps_run_on_a_short_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """msprobe walks through the whole stack at every call: the command's own frames must not count against it."""
    depths: list[int] = []

    def measured(*arguments: Any) -> baseline.Measured:
        depths.append(len(inspect.stack()))
        return baseline.Measured("", "", "ours", 1.0, 1.0, 1.0, 1, 1.0, 0, 0, 0)

    monkeypatch.setattr(baseline, "measure", measured)
    result = CliRunner().invoke(main, ["--models", "LLaMA2", "--only", "check nothing matched"])
    assert result.exit_code == 0, result.output
    assert len(depths) == 1
    assert depths[0] < 10
