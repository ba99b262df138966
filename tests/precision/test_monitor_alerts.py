"""A planted fault is named with the right rule, module and step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_runs import batches
from torch import Tensor, nn

from precision import PrecisionDebugger, PrecisionError
from precision.monitor import Monitor
from precision.monitor.alerts import Alert, first

FAULT = 4


class Stack(nn.Module):
    """Three layers; `fault` is done to the output of the second one at step FAULT."""

    def __init__(self, fault: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.layers[1].fault = self.fault if self.calls == FAULT else None
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.fault: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x)) + x if self.fault is None else self.fault(self, x)


def run(model: nn.Module, folder: Path, rule: str, threshold: float | None = None, **options: Any) -> Monitor:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    args = {} if threshold is None else {"threshold": threshold}
    alert = {"rules": [{"rule_name": rule, "args": args}], **options.pop("alert", {})}
    settings: dict[str, Any] = {"all_xy": True, "wg_distribution": True, "ops": ["norm"], "page": False, **options}
    with Monitor(output_dir=folder, quiet=True, alert=alert, **settings).watch(model, optimizer) as monitor:
        for batch in batches(8, width=16, rows=6):
            loss = model(batch / batch.norm() * 4).square().mean()
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def the_first(monitor: Monitor) -> Alert:
    found = first(monitor.alerts)
    assert found is not None
    return found


def test_an_exploding_layer(tmp_path: Path) -> None:
    monitor = run(Stack(lambda layer, x: layer.fc(x) * 1000), tmp_path, "AnomalyTurbulence", 3)
    found = the_first(monitor)
    assert (found.step, found.module, found.kind, found.rank) == (FAULT, "layers.1", "actv", 0)
    assert monitor.folder is not None
    rows = list(csv.DictReader((monitor.folder / "alerts.csv").read_text().splitlines()))
    assert (rows[0]["step"], rows[0]["module"], rows[0]["rule"]) == (str(FAULT), "layers.1", "AnomalyTurbulence")
    assert len(rows) == len(monitor.alerts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity(value: float, tmp_path: Path) -> None:
    def fault(layer: Layer, x: Tensor) -> Tensor:
        result = layer.fc(x)
        return torch.where(torch.arange(16) == 3, torch.full_like(result, value), result)

    found = the_first(run(Stack(fault), tmp_path, "AnomalyNan"))
    assert (found.step, found.name) == (FAULT, "layers.1.output")
    assert ("NaN" if value != value else "infinite") in found.message


def test_a_dead_relu(tmp_path: Path) -> None:
    def fault(layer: Layer, x: Tensor) -> Tensor:
        return layer.relu(layer.fc(x) - 1e3) + x

    found = the_first(run(Stack(fault), tmp_path, "ConstantOutput"))
    assert (found.step, found.name) == (FAULT, "layers.1.relu.output")
    assert found.module == "layers.1.relu"


def test_exploding_and_vanishing_gradients(tmp_path: Path) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0] * ctx.factor, None

    for rule, factor in (("GradientExplosion", 1e4), ("GradientVanishing", 1e-14)):
        fault = lambda layer, x, factor=factor: Scaled.apply(layer.fc(x), factor)  # noqa: E731
        found = the_first(run(Stack(fault), tmp_path / rule, rule))
        assert (found.step, found.module, found.kind) == (FAULT, "layers.1.fc", "actv_grad"), rule


def test_a_loss_spike_and_nothing_else(tmp_path: Path) -> None:
    monitor = run(Late(lambda layer, x: layer.fc(x) * 100), tmp_path, "LossSpike")
    assert [(alert.step, alert.name, alert.kind) for alert in monitor.alerts] == [(6, "loss", "loss")]


class Late(Stack):
    """The fault comes when there are enough losses to know what is usual."""

    def forward(self, x: Tensor) -> Tensor:
        calls = self.calls
        self.calls = FAULT if calls == 6 else -1
        result = super().forward(x)
        self.calls = calls + 1
        return result


@pytest.mark.parametrize(
    "rule", ["AnomalyNan", "ConstantOutput", "GradientExplosion", "GradientVanishing", "LossSpike"]
)
def test_a_healthy_run_is_left_alone(rule: str, tmp_path: Path) -> None:
    monitor = run(Stack(), tmp_path, rule)
    assert monitor.alerts == []
    assert monitor.folder is not None
    assert not (monitor.folder / "alerts.csv").exists()


def test_the_step_after_the_alert_is_dumped_once(tmp_path: Path) -> None:
    fault = lambda layer, x: layer.fc(x) * 1000  # noqa: E731
    monitor = run(Stack(fault), tmp_path, "AnomalyTurbulence", 3, alert={"dump": True})
    assert monitor.folder is not None
    assert [path.name for path in (monitor.folder / "dump").iterdir()] == [f"step{FAULT + 1}"]
    assert (monitor.folder / "dump" / f"step{FAULT + 1}" / "rank" / "dump.json").exists()


def test_a_debugger_of_ones_own_and_a_busy_one(tmp_path: Path) -> None:
    model = Stack(lambda layer, x: layer.fc(x) * 1000)
    debugger = PrecisionDebugger(dump_path=tmp_path / "mine", level="L1", quiet=True)
    run(model, tmp_path, "AnomalyTurbulence", 3, alert={"dump": True}, debugger=debugger)
    assert (tmp_path / "mine" / f"step{FAULT + 1}" / "rank" / "dump.json").exists()
    busy = PrecisionDebugger(dump_path=tmp_path / "busy", level="L1", quiet=True)
    with busy.start():
        monitor = run(Stack(model.fault), tmp_path, "AnomalyTurbulence", 3, alert={"dump": True}, debugger=busy)
    assert "isn't dumped" in monitor.notes[0]


def test_unknown_rules_and_arguments() -> None:
    with pytest.raises(PrecisionError, match="no alert rule 'Nan'; there are AnomalyTurbulence, AnomalyNan"):
        Monitor(all_xy=True, alert={"rules": [{"rule_name": "Nan"}]})
    with pytest.raises(PrecisionError, match="takes the argument threshold, not limit"):
        Monitor(all_xy=True, alert={"rules": [{"rule_name": "AnomalyNan", "args": {"limit": 1}}]})
