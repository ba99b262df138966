"""What a user gets wrong is refused before anything runs, in one line that says what to do; what is right is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_runs import Net, batches, read
from torch import nn

from precision import PrecisionError
from precision.monitor import Monitor, print_struct


def refusal(**options: Any) -> str:
    with pytest.raises(PrecisionError) as caught:
        Monitor(quiet=True, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_published_form_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "monitor.json"
    target = {"input": "tuple[2]:0", "output": "tuple[2]:1", "input_grad": "tuple[2]:0", "output_grad": "tuple[2]:1"}
    path.write_text(json.dumps({"targets": {"branches": target}, "module_ranks": "0"}))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(path, output_dir=tmp_path / "out", quiet=True).watch(model, optimizer) as monitor:
        model(batches(1)[0]).sum().backward()
        optimizer.step()
    assert monitor.folder is not None
    assert [row["name"] for row in read(monitor.folder, "actv")] == ["branches.input", "branches.output"]
    assert len(read(monitor.folder, "actv_grad")) == 2


@pytest.mark.parametrize("ranks", ["0,1", "0", [0], 0, ["0-3"], []])
def test_ranks_of_a_single_process(ranks: Any, tmp_path: Path) -> None:
    with Monitor(output_dir=tmp_path, quiet=True, all_xy=True, module_ranks=ranks).watch(Net()) as monitor:
        assert monitor.folder is not None


def test_another_rank_is_said_to_collect_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    with Monitor(output_dir=tmp_path, all_xy=True, module_ranks=[1]).watch(model), torch.no_grad():
        model(batches(1)[0])
    assert "nothing is collected on rank 0: module_ranks is [1]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_keys_and_values() -> None:
    assert "no option target; there are alert, all_xy" in refusal(target={})
    assert "ops.1 = 'median'" in refusal(all_xy=True, ops=["norm", "median"])
    assert "'norm', 'min', 'max', 'mean', 'zeros' or 'nans'" in refusal(all_xy=True, ops=["median"])
    assert "'csv', 'tensorboard' or 'both'" in refusal(all_xy=True, format="xlsx")
    assert "step_interval = 0" in refusal(all_xy=True, step_interval=0)
    assert "module_ranks.0 = 'a'" in refusal(all_xy=True, module_ranks="a")
    assert "nothing to collect" in refusal()
    assert "leave nothing" in refusal(all_xy=True, forward_only=True, backward_only=True)


def test_selectors() -> None:
    text = refusal(targets={"fc": {"output": "tuple[2]:2"}})
    assert "targets.fc.output" in text
    assert "entry 2 of a tuple of 2; the last one is 1" in text
    assert '"tuple[N]:I"' in refusal(targets={"fc": {"input": "first"}})


def test_config_files_that_arent(tmp_path: Path) -> None:
    assert "can't be read" in refusal(config_path=tmp_path / "none.json")
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, not a list")):
        (tmp_path / "bad.json").write_text(text)
        assert message in refusal(config_path=tmp_path / "bad.json")


def test_a_module_that_isnt_there_with_the_nearest(tmp_path: Path) -> None:
    monitor = Monitor(output_dir=tmp_path, quiet=True, targets={"branches.lft": {}})
    with pytest.raises(PrecisionError, match=r"no module 'branches.lft' to watch; the nearest are branches.left"):
        monitor.watch(Net())
    held = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(PrecisionError, match="is a ModuleList, which is never called"):
        Monitor(output_dir=tmp_path, targets={"0": {}}).watch(nn.ModuleList([held]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"output": "tuple[2]:0"}, 'the output of head is tensor (5, 3) float32, which .* write "tensor"'),
        ({"input": "tuple[3]:1"}, 'the input of head is tuple[1] (tensor (5, 4) float32), which .* write "tensor"'),
    ],
)
def test_a_selector_that_doesnt_fit_stops_the_first_forward_pass(
    target: dict[str, str], message: str, tmp_path: Path
) -> None:
    model = Net()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pattern = message.replace("(", r"\(").replace(")", r"\)").replace("[1]", r"\[1\]")
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, targets={"head": target})

    def train() -> None:
        with monitor.watch(model, optimizer):
            model(batches(1)[0]).sum().backward()
            optimizer.step()

    with pytest.raises(PrecisionError, match=pattern):
        train()
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), before))
    # and the model is free again
    model(batches(1)[0])


def test_folders_that_cant_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrecisionError, match=r"the monitor can't write to .*file.*choose another output_dir"):
        Monitor(output_dir=tmp_path / "file", all_xy=True).watch(Net())


def test_what_needs_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="mv_distribution, param_distribution needs the optimizer"):
        Monitor(output_dir=tmp_path, mv_distribution=True, param_distribution=True).watch(Net())
    with pytest.raises(PrecisionError, match="without step"):
        Monitor(output_dir=tmp_path, quiet=True, all_xy=True).watch(Net(), object())
    with pytest.raises(PrecisionError, match="grad_acc_steps is 0"):
        Monitor(output_dir=tmp_path, all_xy=True).watch(Net(), grad_acc_steps=0)


def test_the_struct_says_what_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Net()
    text = print_struct(model, batches(1)[0])
    assert text == capsys.readouterr().out.rstrip("\n")
    assert (
        "  branches [Branches] input: tuple[2] (tensor (5, 4) float32, tensor (5, 4) float32); "
        "output: tuple[2] (tensor (5, 4) float32, tensor (5, 4) float32)"
    ) in text.splitlines()
    assert "(model) [Net] input: tensor (5, 4) float32; output: tensor (5, 3) float32" in text
    with Monitor(output_dir=tmp_path, all_xy=True, print_struct=True).watch(model):
        model(batches(1)[0])
        model(batches(1)[0])
    assert capsys.readouterr().err.count("    branches.left [Linear]") == 1
    assert not any(module._forward_hooks for module in model.modules())
