"""Training: every figure is that of a plain recomputation, and watching changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_runs import EVERYTHING, Net, assert_row, batches, by_name, loss_of, read
from torch import Tensor, nn

from precision.monitor import Monitor

WATCHED: dict[str, Any] = {**EVERYTHING, "page": False}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Plain:
    """The same run without a monitor, keeping every tensor that the monitor has figures of."""

    def __init__(self, model: nn.Module, grad_acc_steps: int = 1) -> None:
        self.model = model
        self.optimizer = optimizer_of(model)
        self.grad_acc_steps = grad_acc_steps
        self.tensors: dict[tuple[str, str, int, int], Tensor] = {}
        self.losses: list[float] = []
        self.step = self.micro_step = 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._inputs(name))
            module.register_forward_hook(self._outputs(name))

    def run(self, inputs: list[Tensor]) -> None:
        for number, batch in enumerate(inputs):
            self.step, self.micro_step = divmod(number, self.grad_acc_steps)
            loss = loss_of(self.model(batch))
            loss.backward()
            self.losses.append(loss.item())
            if self.micro_step == self.grad_acc_steps - 1:
                self._update()

    def _update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self._keep("grad_reduced", name, parameter.grad)
            self._keep("param_origin", name, parameter)
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            self._keep("param_updated", name, parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                self._keep(key, name, self.optimizer.state[parameter][key])
        self.optimizer.zero_grad()

    def _keep(self, kind: str, name: str, tensor: Tensor | None) -> None:
        assert tensor is not None
        micro_step = self.micro_step if kind.startswith("actv") else 0
        self.tensors[kind, name, self.step, micro_step] = tensor.detach().clone()

    def _inputs(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            for place, arg in enumerate(args):
                self._keep("actv", self._row(name, "input", args, place), arg)

        return hook

    def _outputs(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            results = result if isinstance(result, tuple) else (result,)
            for place, tensor in enumerate(results):
                row, step, micro_step = self._row(name, "output", results, place), self.step, self.micro_step
                self._keep("actv", row, tensor)

                def keep(gradient: Tensor, where: Any = ("actv_grad", row, step, micro_step)) -> None:
                    self.tensors[where] = gradient.clone()

                tensor.register_hook(keep)

        return hook

    def _row(self, name: str, side: str, tensors: tuple[Any, ...], place: int) -> str:
        return f"{name}.{side}" if len(tensors) == 1 else f"{name}.{side}_{place}"


def watched_run(
    model: nn.Module, inputs: list[Tensor], folder: Path, grad_acc_steps: int = 1, **options: Any
) -> tuple[Monitor, list[float]]:
    optimizer = optimizer_of(model)
    losses = []
    monitor = Monitor(output_dir=folder, quiet=True, **{**WATCHED, **options})
    with monitor.watch(model, optimizer, grad_acc_steps=grad_acc_steps):
        for number, batch in enumerate(inputs):
            loss = loss_of(model(batch))
            loss.backward()
            losses.append(loss.item())
            if (number + 1) % grad_acc_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return monitor, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_acc_steps", [1, 2])
def test_every_figure_of_every_kind(dtype: torch.dtype, grad_acc_steps: int, tmp_path: Path) -> None:
    inputs = batches(3 * grad_acc_steps, dtype)
    model = Net(dtype=dtype)
    plain = Plain(copy.deepcopy(model), grad_acc_steps)
    plain.run(inputs)
    monitor, losses = watched_run(model, inputs, tmp_path, grad_acc_steps)
    assert losses == plain.losses
    for mine, other in zip(model.parameters(), plain.model.parameters()):
        assert torch.equal(mine, other)
    assert monitor.folder is not None
    checked = set()
    kinds = {kind for kind, *_ in plain.tensors}
    for kind in kinds:
        for row in read(monitor.folder, kind):
            key = (kind, row["name"], int(row["step"]), int(row.get("micro_step", 0)))
            if kind != "actv_grad" or ".output" in row["name"]:
                assert_row(row, plain.tensors[key])
                checked.add(key)
    assert checked == set(plain.tensors)
    for row in read(monitor.folder, "grad_unreduced"):
        assert_row(row, plain.tensors["grad_reduced", row["name"], int(row["step"]), 0])
    assert len(read(monitor.folder, "grad_unreduced")) == len(read(monitor.folder, "grad_reduced"))


def test_input_gradients_are_each_modules_own_share(tmp_path: Path) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    expected: dict[str, tuple[Any, ...]] = {}
    # torch's own hooks can't be on the module before an in-place one
    for name in ("branches", "branches.left", "branches.right", "head"):
        twin.get_submodule(name).register_full_backward_hook(
            lambda module, inputs, outputs, name=name: expected.update({name: inputs})
        )
    inputs = batches(1)
    loss_of(twin(inputs[0])).backward()
    monitor, _ = watched_run(model, inputs, tmp_path)
    assert monitor.folder is not None
    rows = by_name(read(monitor.folder, "actv_grad"))
    for name in ("branches.left", "branches.right", "head"):
        assert_row(rows[f"{name}.input"], expected[name][0])
    # the same tensor twice: what both uses add up to, under each
    assert_row(rows["branches.input_0"], sum(expected["branches"]))


def test_selectors_name_one_tensor_each(tmp_path: Path) -> None:
    targets = {
        "branches": {"input": "tuple[2]:1", "output": "tuple[2]:0", "output_grad": "tuple[2]:1"},
        "head": {"input": "tensor", "output": "tensor", "input_grad": "tensor"},
    }
    monitor, _ = watched_run(Net(), batches(1), tmp_path, all_xy=False, targets=targets)
    assert monitor.folder is not None
    assert [row["name"] for row in read(monitor.folder, "actv")] == [
        "branches.input",
        "branches.output",
        "head.input",
        "head.output",
    ]
    assert sorted(row["name"] for row in read(monitor.folder, "actv_grad")) == ["branches.output", "head.input"]


def test_forward_only_and_backward_only(tmp_path: Path) -> None:
    for option, kept, left_out in (("forward_only", "actv", "actv_grad"), ("backward_only", "actv_grad", "actv")):
        monitor, _ = watched_run(Net(), batches(1), tmp_path / option, **{option: True})
        assert monitor.folder is not None
        assert read(monitor.folder, kept)
        assert not read(monitor.folder, left_out)


def test_steps_that_are_asked_for(tmp_path: Path) -> None:
    monitor, _ = watched_run(
        Net(), batches(9), tmp_path, start_step=2, step_interval=3, collect_times=2, step_count_per_record=4
    )
    assert monitor.folder is not None
    for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "exp_avg", "param_updated"):
        assert {row["step"] for row in read(monitor.folder, kind)} == {"2", "5"}
    assert {path.name for path in monitor.folder.glob("actv_[0-9]*.csv")} == {"actv_0-3.csv", "actv_4-7.csv"}


def test_inside_of_a_transform(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    parameters, x = dict(model.named_parameters()), torch.randn(2, 4)
    with Monitor(output_dir=tmp_path, quiet=True, page=False, all_xy=True).watch(model) as monitor:
        torch.func.grad(lambda parameters: torch.func.functional_call(model, parameters, (x,)).sum())(parameters)
        monitor.step()
    assert monitor.folder is not None
    assert_row(by_name(read(monitor.folder, "actv"))[".output"], model(x))


def test_a_module_that_is_called_twice_has_two_rows(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    monitor, _ = watched_run(Twice(), batches(2), tmp_path)
    assert monitor.folder is not None
    for step in (0, 1):
        assert {"fc.output", "fc.output.call1"} < set(by_name(read(monitor.folder, "actv", step)))
        assert {"fc.output", "fc.output.call1"} < set(by_name(read(monitor.folder, "actv_grad", step)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_isnt_counted_again(use_reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.fc(x)
            return self.head(torch.utils.checkpoint.checkpoint(self.branches.left, hidden, use_reentrant=use_reentrant))

    monitor, _ = watched_run(Checkpointed(), batches(2), tmp_path)
    assert monitor.folder is not None
    for step in (0, 1):
        assert "branches.left.output" in by_name(read(monitor.folder, "actv", step))
        assert "branches.left.output" in by_name(read(monitor.folder, "actv_grad", step))


def test_an_evaluation_between_two_steps_isnt_part_of_them(tmp_path: Path) -> None:
    model = Net()
    optimizer = optimizer_of(model)
    with Monitor(output_dir=tmp_path, quiet=True, **WATCHED).watch(model, optimizer) as monitor:
        for batch in batches(2):
            loss_of(model(batch)).backward()
            with torch.no_grad():
                model(batch * 100)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.folder is not None
    for step in (0, 1):
        by_name(read(monitor.folder, "actv", step))
        assert len(read(monitor.folder, "grad_reduced", step)) == len(list(model.parameters()))


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = Net()
    monitor = Monitor(output_dir=tmp_path, quiet=True, all_xy=True, wg_distribution=True)
    with monitor.watch(model, start_iteration=7):
        for batch in batches(2):
            loss = loss_of(model(batch))
            loss.backward()
            monitor.loss(loss)
            monitor.step()
    assert monitor.folder is not None
    assert {row["step"] for row in read(monitor.folder, "actv")} == {"7", "8"}
    assert [float(row["value"]) for row in read(monitor.folder, "loss", 8)] == [pytest.approx(loss.item(), rel=1e-5)]
    assert_row(by_name(read(monitor.folder, "grad_reduced", 8))["head.bias"], model.head.bias.grad)  # type: ignore[arg-type]


def test_writes_past_the_version_counter_are_seen(tmp_path: Path) -> None:
    model = nn.Linear(96, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(output_dir=tmp_path, quiet=True, page=False, wg_distribution=True).watch(model, optimizer) as monitor:
        model(torch.ones(2, 96)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.data.mul_(0.5)
        optimizer.step()
    assert monitor.folder is not None
    before, after = (
        float(by_name(read(monitor.folder, kind))["weight"]["norm"]) for kind in ("grad_unreduced", "grad_reduced")
    )
    assert after == pytest.approx(before / 2, rel=1e-5)
