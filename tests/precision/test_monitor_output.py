"""What a run leaves behind: files, page, console lines; and that nothing stays hooked."""

from __future__ import annotations

import builtins
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from monitor_runs import EVERYTHING, OPS, Net, batches, by_name, loss_of, read
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from precision.monitor import Monitor
from precision.monitor.__main__ import main


def train(folder: Path, steps: int = 3, monitor: Monitor | None = None, between: Any = None, **options: Any) -> Monitor:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings: dict[str, Any] = {**EVERYTHING, "page": False, **options}
    monitor = monitor or Monitor(output_dir=folder, quiet=True, **settings)
    with monitor.watch(model, optimizer):
        for step, batch in enumerate(batches(steps)):
            if between is not None:
                between(step)
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for parameter in model.parameters():
        found += list((parameter._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]
    return [*found, *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def test_the_files_are_named_and_filled_as_the_peers(tmp_path: Path) -> None:
    monitor = train(tmp_path, 2)
    assert monitor.folder is not None
    assert re.fullmatch(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d-rank0-[0-9a-f]{8}", monitor.folder.name)
    kinds = (
        "actv",
        "actv_grad",
        "grad_unreduced",
        "grad_reduced",
        "exp_avg",
        "exp_avg_sq",
        "param_origin",
        "param_updated",
    )
    assert {path.name for path in monitor.folder.iterdir()} == {f"{kind}_{n}-{n}.csv" for kind in kinds for n in (0, 1)}
    head = (monitor.folder / "actv_0-0.csv").read_text().splitlines()[0]
    assert head == "vpp_stage,name,step,micro_step,norm,min,max,mean,zeros,nans,shape,dtype"
    head = (monitor.folder / "exp_avg_0-0.csv").read_text().splitlines()[0]
    assert head == "vpp_stage,name,step,norm,min,max,mean,zeros,nans,shape,dtype"


def test_figures_and_digits_that_are_asked_for(tmp_path: Path) -> None:
    monitor = train(tmp_path, 1, ops=["max", "norm"], ndigits=3)
    assert monitor.folder is not None
    row = read(monitor.folder, "param_origin")[0]
    assert list(row) == ["vpp_stage", "name", "step", "max", "norm", "shape", "dtype"]
    expected = Net().fc.weight.detach()
    assert row["max"] == f"{float(expected.max()):.3g}"
    assert row["norm"] == f"{float(expected.norm()):.3g}"


def test_small_gradients_keep_their_digits(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, wg_distribution=True)
    with monitor.watch(model, optimizer):
        (loss_of(model(batches(1)[0])) * 1e-9).backward()
        optimizer.step()
    assert monitor.folder is not None
    norm = float(model.head.bias.grad.norm())  # type: ignore[union-attr]
    row = by_name(read(monitor.folder, "grad_reduced"))["head.bias"]
    assert float(row["norm"]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_hooked(fails: bool, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = hooks_of(model, optimizer)
    graph = None
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, print_struct=True, **EVERYTHING)
    try:
        with monitor.watch(model, optimizer):
            assert len(hooks_of(model, optimizer)) > 20
            loss_of(model(batches(1)[0])).backward()
            optimizer.step()
            graph = loss_of(model(batches(1)[0]))
            if fails:
                model(torch.ones(2, 77))
    except RuntimeError:
        assert fails
    assert hooks_of(model, optimizer) == before == []
    rows = len(read(monitor.folder, "actv_grad"))  # type: ignore[arg-type]
    assert graph is not None
    graph.backward()
    optimizer.step()
    assert len(read(monitor.folder, "actv_grad")) == rows  # type: ignore[arg-type]
    assert monitor.close() == monitor.notes
    # a monitor can be used again
    with monitor.watch(model, optimizer):
        pass
    assert hooks_of(model, optimizer) == []


def test_a_forward_pass_that_raised_doesnt_mix_up_the_next(tmp_path: Path) -> None:
    model = Net()
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, all_xy=True)
    with monitor.watch(model):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 77))
        loss_of(model(batches(1)[0])).backward()
        monitor.step()
    assert monitor.folder is not None
    rows = [row for row in read(monitor.folder, "actv_grad") if row["name"] == "head.input"]
    assert [row["shape"] for row in rows] == ["[5, 4]"]


def test_on_and_off_and_other_options_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "monitor.json"

    def edit(step: int) -> None:
        options: dict[int, Any] = {
            1: {"all_xy": True, "dynamic_on": False},
            3: {"targets": {"head": {"output": "tensor"}}, "xy_distribution": True, "wg_distribution": True},
            5: {"targets": {"nothing": {}}},
        }
        if step in options:
            path.write_text(json.dumps(options[step]))
            os.utime(path, ns=(step, step))

    path.write_text(json.dumps({"all_xy": True}))
    monitor = Monitor(path, output_dir=tmp_path / "out", quiet=True, page=False)
    train(tmp_path, 8, monitor, between=edit)
    assert monitor.folder is not None
    # an edit during step n is in force from step n + 1 on
    assert {row["step"] for row in read(monitor.folder, "actv")} == {"0", "1", "4", "5", "6", "7"}
    assert [row["name"] for row in read(monitor.folder, "actv", 4)] == ["head.output"]
    assert {row["step"] for row in read(monitor.folder, "grad_reduced")} == {"4", "5", "6", "7"}
    assert "no module 'nothing' to watch" in monitor.notes[-1]


def test_other_columns_while_it_runs_go_to_another_folder(tmp_path: Path) -> None:
    path = tmp_path / "monitor.json"
    path.write_text(json.dumps({"all_xy": True, "step_count_per_record": 9}))
    monitor = Monitor(path, output_dir=tmp_path / "out", quiet=True, page=False)

    def edit(step: int) -> None:
        if step == 1:
            path.write_text(json.dumps({"all_xy": True, "step_count_per_record": 9, "ops": ["max"]}))
            os.utime(path, ns=(1, 1))

    train(tmp_path, 4, monitor, between=edit)
    runs = sorted((tmp_path / "out").iterdir(), key=lambda run: "norm" not in read(run, "actv")[0])
    assert [{row["step"] for row in read(run, "actv")} for run in runs] == [{"0", "1"}, {"2", "3"}]
    assert "norm" not in read(runs[1], "actv")[0]


def test_a_full_disk_doesnt_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.open

    def full(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "a" in mode and "_2-2.csv" in str(path):
            raise OSError(28, "No space left on device")
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", full)
    monitor = train(tmp_path, 5)
    assert monitor.notes == ["no more figures are written after step 2: No space left on device"]
    assert monitor.folder is not None
    assert {row["step"] for row in read(monitor.folder, "actv")} == {"0", "1"}


def test_the_page_holds_the_run_and_loads_nothing(tmp_path: Path) -> None:
    alert = {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0}}]}
    monitor = train(tmp_path, 3, page=True, alert=alert)
    assert monitor.folder is not None
    text = (monitor.folder / "monitor.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?://|@import", text)
    assert f"First alert: step {monitor.alerts[0].step}, rank 0" in text
    tables = json.loads(re.search(r"const tables = (.*);\n", text)[1])  # type: ignore[index]
    table = next(table for table in tables if table["title"] == "rank 0 param_updated")
    assert table["ops"] == list(OPS)
    assert table["steps"] == [0, 1, 2]
    rows = read(monitor.folder, "param_updated")
    for place, name in enumerate(table["names"]):
        shown = table["values"]["norm"][place]
        assert shown == [float(row["norm"]) for row in rows if row["name"] == name]


def test_the_command_joins_ranks_and_names_the_first_alert(tmp_path: Path) -> None:
    nan = {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0.0}}]}
    for rank, start in ((0, 5), (1, 2)):
        model = Net()
        monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, all_xy=True, alert=nan)
        with monitor.watch(model, start_iteration=start), torch.no_grad():
            model(batches(1)[0])
        assert monitor.folder is not None
        alerts = monitor.folder / "alerts.csv"
        alerts.write_text(alerts.read_text().replace(f"\n{start},0,", f"\n{start},{rank},"))
        monitor.folder.rename(tmp_path / monitor.folder.name.replace("rank0", f"rank{rank}"))
    run = CliRunner().invoke(main, [str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert "alerts: step 2, rank 1, actv .input: AnomalyNan" in run.output
    text = (tmp_path / "monitor.html").read_text()
    assert "rank 0 actv" in text
    assert "rank 1 actv" in text
    assert "exists already; pass --force" in CliRunner().invoke(main, [str(tmp_path)]).output
    assert CliRunner().invoke(main, [str(tmp_path), "--force"]).exit_code == 0
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(main, [str(tmp_path / "empty")])
    assert refused.exit_code != 0
    assert "holds no figures of a monitor" in refused.output


def test_long_runs_are_thinned_but_for_alerts(tmp_path: Path) -> None:
    from precision.monitor.page import MAX_STEPS, _thinned

    shown = _thinned(list(range(10 * MAX_STEPS)), {17})
    assert 17 in shown
    assert len(shown) == MAX_STEPS + 1


def test_lines_on_the_console_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(output_dir=tmp_path, quiet=True, page=False, live=True, **EVERYTHING)
    train(tmp_path, 2, monitor)
    assert monitor.folder is not None
    norm = sum(float(row["norm"]) ** 2 for row in read(monitor.folder, "grad_reduced", 1)) ** 0.5
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["monitor: step 0", "monitor: step 1"]
    assert f"gradient norm {norm:.3g}"[:-1] in lines[1]


def test_tensorboard(tmp_path: Path) -> None:
    monitor = train(tmp_path, 3, format="both")
    assert monitor.folder is not None
    events = EventAccumulator(str(monitor.folder)).Reload()
    points = [(event.step, event.value) for event in events.Scalars("param_updated/0:head.bias/norm")]
    rows = [row for row in read(monitor.folder, "param_updated") if row["name"] == "head.bias"]
    assert points == [(int(row["step"]), pytest.approx(float(row["norm"]), rel=1e-5)) for row in rows]
    alone = train(tmp_path / "alone", 1, format="tensorboard")
    assert alone.folder is not None
    assert not list(alone.folder.glob("*.csv"))
