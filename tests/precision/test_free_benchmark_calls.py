"""Running calls again: nothing of it reaches the model, and nothing that can't be run again goes unsaid."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Net
from torch import Tensor, nn

from precision import PrecisionDebugger, PrecisionError
from precision.free_benchmark.config import PERT_MODES

BACKWARD_MODES = PERT_MODES[:6]
PEER_COLUMNS = "rank,pert_mode,stage,step,api_name,max_rel,dtype,shape,output_index"


def debugger(folder: Path, **options: Any) -> PrecisionDebugger:
    return PrecisionDebugger(dump_path=folder, task="free_benchmark", quiet=True, **options)


def calls(folder: Path, step: int = 0, who: str = "rank") -> list[dict[str, str]]:
    with open(folder / f"step{step}" / who / "free_benchmark_calls.csv") as file:
        return list(csv.DictReader(file))


def flagged(folder: Path, step: int = 0) -> list[dict[str, str]]:
    with open(folder / f"step{step}/rank/free_benchmark.csv") as file:
        return list(csv.DictReader(file))


class Mixed(nn.Module):
    """Dropout, random numbers, operations in place and into out=, besides a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(F.dropout(x, 0.3))
        y = self.drop(y * 2) + torch.rand_like(y)
        y = y.contiguous()
        y.mul_(0.5)
        y += 1
        torch.add(y.detach(), 1, out=y.detach())
        y[0] = 3.0
        image = self.convolution(y.clone().reshape(1, 1, *y.shape))
        return y.exp().sum(-1) + F.relu(y * 1.5, inplace=True).mean() + image.square().mean()


def train(tool: PrecisionDebugger | None) -> list[Tensor]:
    """Output, gradients and the next random number of one training step."""
    torch.manual_seed(3)
    model = Mixed()
    x = torch.randn(6, 4).requires_grad_()
    with contextlib.nullcontext() if tool is None else tool.start(model):
        result = model(x)
        result.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [result.detach(), x.grad, torch.rand(3), *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("stage", "mode"), [*(("forward", mode) for mode in PERT_MODES), *(("backward", mode) for mode in BACKWARD_MODES)]
)
def test_results_gradients_and_random_numbers_stay_the_same_bit_for_bit(tmp_path: Path, mode: str, stage: str) -> None:
    checked = train(debugger(tmp_path, pert_mode=mode, fuzz_stage=stage))
    for plain, seen in zip(train(None), checked):
        assert torch.equal(plain, seen)
    assert sum(row["verdict"] == "ok" for row in calls(tmp_path)) > 8


def test_stateful_calls_run_again_as_they_were(tmp_path: Path) -> None:
    train(debugger(tmp_path, pert_mode="no_change"))
    rows = {row["api_name"]: row for row in calls(tmp_path)}
    for name in (
        "Functional.dropout.0",
        "Functional.dropout.1",
        "Tensor.mul_.0",
        "Tensor.add_.0",
        "Torch.add.0",
        "Functional.relu.1",
    ):
        assert rows[name]["verdict"] == "ok", rows[name]
    assert not flagged(tmp_path)


@pytest.mark.parametrize("mode", BACKWARD_MODES)
def test_backward_checks_cover_softmax_and_matmul(tmp_path: Path, mode: str) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tool = debugger(tmp_path, pert_mode=mode, fuzz_stage="backward", list=["softmax", "matmul"])
    with tool.start():
        (torch.matmul(x.softmax(-1), x.mT) ** 2).sum().backward()
    rows = {row["api_name"]: row for row in calls(tmp_path)}
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert set(rows) == {"Tensor.softmax.0", "Torch.matmul.0"}
    assert {row["stage"] for row in rows.values()} == {"backward"}


def test_gradients_computed_again_equal_autograds(tmp_path: Path) -> None:
    """no_change is an equality bit for bit of every gradient of every call with autograd's own."""
    train(debugger(tmp_path, pert_mode="no_change", fuzz_stage="backward"))
    rows = [row for row in calls(tmp_path) if row["verdict"] != "not checked"]
    assert len(rows) > 15
    assert {(row["verdict"], float(row["max_rel"])) for row in rows} == {("ok", 0.0)}


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.narrow = x.dtype == torch.bfloat16
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (2.04 if ctx.narrow else 2)

    class Table:
        twice = staticmethod(Wrong.apply)

    table = Table()
    tool = debugger(tmp_path, fuzz_stage="backward", list=["twice"])
    tool.register_api(table, ["twice"])
    x = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    with tool.start():
        table.twice(x).sum().backward()
    assert [row["verdict"] for row in calls(tmp_path)] == ["wrong kernel"]


def test_without_a_process_group_rows_are_written_in_the_peers_columns(tmp_path: Path) -> None:
    with debugger(tmp_path, pert_mode="no_change").start():
        torch.ones(3).add(1)
    path = tmp_path / "step0/rank/free_benchmark.csv"
    # nothing failed: the file says so by being there
    assert path.read_text().splitlines() == [PEER_COLUMNS]
    tool, table = debugger(tmp_path / "wrong"), _wrong_table()
    tool.register_api(table, ["twice"])
    with tool.start():
        table.twice(torch.ones(2, 8, dtype=torch.bfloat16))
    (row,) = flagged(tmp_path / "wrong")
    assert {key: row[key] for key in PEER_COLUMNS.split(",") if key != "max_rel"} == {
        "rank": "0",
        "pert_mode": "improve_precision",
        "stage": "forward",
        "step": "0",
        "api_name": "NPU.twice.0",
        "dtype": "torch.bfloat16",
        "shape": "torch.Size([2, 8])",
        "output_index": "0",
    }
    assert 0.01 < float(row["max_rel"]) < 0.03
    page = (tmp_path / "wrong/step0/rank/free_benchmark.html").read_text()
    assert "NPU.twice.0" in page
    assert "wrong kernel" in page
    assert "http" not in page


def _wrong_table() -> Any:
    class Table:
        def twice(self, x: Tensor) -> Tensor:
            return x * (2.05 if x.dtype == torch.bfloat16 else 2)

    return Table()


def test_a_wrong_first_chunk_of_a_large_output_is_found(tmp_path: Path) -> None:
    class Table:
        def double(self, x: Tensor) -> Tensor:
            y = x * 2
            if x.dtype == torch.bfloat16:
                y[: 1 << 10] *= 5
            return y

    table = Table()
    tool = debugger(tmp_path, list=["double"])
    tool.register_api(table, ["double"])
    x = torch.ones(36 << 19, dtype=torch.bfloat16)
    assert 2 * x.numel() > 32 << 20
    with tool.start():
        table.double(x)
    assert [row["verdict"] for row in calls(tmp_path)] == ["wrong kernel"]


def test_what_cannot_run_again_is_listed_with_its_reason_and_the_model_goes_on(tmp_path: Path) -> None:
    class Table:
        def picky(self, x: Tensor) -> Tensor:
            if x.dtype != torch.bfloat16:
                raise RuntimeError("only bfloat16 here")
            return x + 1

        def sneaky(self, x: Tensor) -> Tensor:
            x.fill_(7)
            return x * 2

    for handler in ("check", "fix"):
        folder, table = tmp_path / handler, Table()
        tool = debugger(folder, handler_type=handler)
        tool.register_api(table, ["picky", "sneaky"])
        x = torch.ones(4, dtype=torch.bfloat16)
        with tool.start():
            assert torch.equal(table.picky(x), x + 1)
            first = table.sneaky(x.clone())
            second = table.sneaky(x.clone())
            torch.arange(3)
        assert first.tolist() == second.tolist() == [14.0] * 4
        rows = {row["api_name"]: row for row in calls(folder)}
        assert "only bfloat16 here" in rows["NPU.picky.0"]["reason"]
        assert "wrote to an input" in rows["NPU.sneaky.0"]["reason"]
        page = (folder / "step0/rank/free_benchmark.html").read_text()
        assert "only bfloat16 here" in page
        assert "not checked 1" in str(tool.summary)


def test_an_error_of_the_model_is_the_models_own(tmp_path: Path) -> None:
    tool = debugger(tmp_path)
    with pytest.raises(RuntimeError, match="size"), tool.start():
        torch.ones(2) + torch.ones(3)
    assert calls(tmp_path) == []


@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu"])
def test_fix_lets_the_model_go_on_with_the_better_result(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    model = Net().bfloat16()
    x = torch.randn(5, 4, dtype=torch.bfloat16).requires_grad_()
    tool = debugger(tmp_path, handler_type="fix", pert_mode=mode, list=["linear"])
    with tool.start(model):
        fixed = model(x)
    fixed.sum().backward()

    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.float(), layer.weight.float(), layer.bias.float()).bfloat16()

    hidden = model.block.norm(F.relu(linear(model.block.fc, x)) * 2.0)
    expected = linear(model.head, hidden + hidden.softmax(-1))
    assert torch.equal(fixed, expected)
    assert x.grad is not None
    assert "replaced the results of 2 of 2 calls" in str(tool.summary)


def test_rotation_covers_every_call_in_the_steps_it_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.ReLU(), nn.Linear(8, 3))
    tool = debugger(tmp_path, rotate=True, pert_mode="no_change")
    names: set[str] = set()
    for step in range(5):
        with tool.start(model):
            model(torch.ones(2, 8))
        rows = [row["api_name"] for row in calls(tmp_path, step)]
        assert len(rows) == 3
        names.update(rows)
        tool.step()
    assert names == {*(f"Functional.linear.{n}" for n in range(6)), "Functional.relu.0"}
    assert "every call is checked within 5 steps; 5 done" in str(tool.summary)


def test_rotation_covers_every_piece_of_a_large_linear_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precision.free_benchmark.pieces.PIECE", 16)
    layer = nn.Linear(8, 8).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1)

    class Table:
        def linear(self, x: Tensor, weight: Tensor) -> Tensor:
            # wrong in the last two columns of the whole layer; the reduced call of another piece can't show it
            y = F.linear(x, weight)
            return y if weight.shape[0] < 8 else torch.cat([y[..., :6], y[..., 6:] * 2], dim=-1)

    table = Table()
    tool = debugger(tmp_path, rotate=True, list=["linear"])
    tool.register_api(table, ["linear"])
    found = []
    for step in range(4):
        with tool.start():
            table.linear(torch.ones(2, 8, dtype=torch.bfloat16), layer.weight)
        found += [row["verdict"] for row in calls(tmp_path, step)]
        tool.step()
    assert found == ["ok", "ok", "ok", "wrong kernel"]


def test_preheat_raises_limits_only_where_the_cpu_agrees(tmp_path: Path) -> None:
    class Table:
        def steep(self, x: Tensor) -> Tensor:
            return (x * 500).sin()

        def wrong(self, x: Tensor) -> Tensor:
            return x * (2.05 if x.dtype == torch.bfloat16 else 2) if x.dtype != torch.float64 else x * 2

    x = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    table = Table()
    tool = debugger(tmp_path, pert_mode="add_noise", if_preheat=True, preheat_step=2, list=["steep"])
    tool.register_api(table, ["steep"])
    for _ in range(3):
        with tool.start():
            table.steep(x)
        tool.step()
    plain = debugger(tmp_path / "plain", pert_mode="add_noise", list=["steep"])
    plain.register_api(table, ["steep"])
    with plain.start():
        table.steep(x)
    assert len(flagged(tmp_path / "plain")) == 1
    assert [len(flagged(tmp_path, step)) for step in range(3)] == [0, 0, 0]
    wrong = debugger(tmp_path / "wrong", if_preheat=True, preheat_step=2, list=["wrong"])
    wrong.register_api(table, ["wrong"])
    with wrong.start():
        table.wrong(x.bfloat16())
    assert len(flagged(tmp_path / "wrong")) == 1


def test_graph_mode_checks_the_nodes_under_the_modules_they_came_from(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = Net().eval()
    tool = debugger(tmp_path, level="graph")
    compiled = torch.compile(model, backend=tool.compile_backend("eager"))
    with torch.no_grad(), tool.start(model):
        result = compiled(torch.ones(2, 4))
    assert torch.equal(result, model(torch.ones(2, 4)))
    rows = calls(tmp_path)
    assert {row["verdict"] for row in rows} == {"ok"}
    linear = [row["module"] for row in rows if "linear" in row["api_name"]]
    assert linear == ["Module.block.fc.Linear.forward.0", "Module.head.Linear.forward.0"]


def test_eager_rows_name_the_module(tmp_path: Path) -> None:
    model = Net()
    with debugger(tmp_path).start(model):
        model(torch.ones(2, 4))
    modules = {row["api_name"]: row["module"] for row in calls(tmp_path)}
    assert modules["Functional.linear.0"] == "block.fc"
    assert modules["Functional.relu.0"] == "block"
    assert modules["Functional.linear.1"] == "head"


def test_a_list_that_matches_nothing_is_said(tmp_path: Path) -> None:
    model, tool = Net(), debugger(tmp_path, list=["conv2d", "linear.1"])
    with tool.start(model):
        model(torch.ones(2, 4))
    assert [row["api_name"] for row in calls(tmp_path)] == ["Functional.linear.1"]
    assert "matched no call: conv2d" in str(tool.summary)


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    reports = []
    for number, seed in enumerate((5, 5, 6)):
        model, folder = Net(), tmp_path / str(number)
        with debugger(folder, pert_mode="add_noise", seed=seed).start(model):
            model(torch.full((2, 4), 0.3))
        reports.append([row["max_rel"] for row in calls(folder)])
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"handler_type": "mend"}, "there are check, fix"),
        ({"pert_mode": "noise"}, "improve_precision, add_noise"),
        ({"handler_type": "fix", "pert_mode": "add_noise"}, "improve_precision or to_cpu"),
        ({"handler_type": "fix", "fuzz_stage": "backward"}, "forward stage"),
        ({"fuzz_device": "cpu"}, "to_cpu"),
        ({"fuzz_stage": "backward", "pert_mode": "condition"}, "forward stage"),
        ({"level": "L0"}, "there are L1, graph"),
        ({"preheat_steps": 3}, "preheat_step"),
    ],
)
def test_a_wrong_option_names_the_valid_ones(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        debugger(tmp_path, **options)


def test_the_peers_config_file_and_the_older_spelling_work(tmp_path: Path) -> None:
    section = {"scope": [], "list": ["softmax"], "fuzz_level": "L1", "fuzz_device": "cpu", "pert_mode": "to_cpu"}
    section.update(fuzz_stage="forward", handler_type="check", if_preheat=False, preheat_step=15, max_sample=20)
    content = {"task": "free_benchmark", "dump_path": str(tmp_path / "file"), "rank": [], "step": [], "level": "L1"}
    (tmp_path / "config.json").write_text(json.dumps({**content, "free_benchmark": section}))
    from_file = PrecisionDebugger(str(tmp_path / "config.json"), quiet=True)
    older = PrecisionDebugger(dump_path=tmp_path / "hook", hook_name="free_benchmark", quiet=True, list=["softmax"])
    for tool, folder in ((from_file, "file"), (older, "hook")):
        with tool.start():
            torch.ones(3).softmax(-1)
        assert [row["api_name"] for row in calls(tmp_path / folder)] == ["Tensor.softmax.0"]


def test_an_earlier_report_is_not_overwritten(tmp_path: Path) -> None:
    with debugger(tmp_path).start():
        torch.ones(3).softmax(-1)
    with pytest.raises(PrecisionError, match="holds a report already"):
        debugger(tmp_path).start()
