"""The debugger: what is recorded under which name, what is left out and said so, and that nothing stays behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import Net, records
from torch import nn

from precision import PrecisionDebugger, PrecisionError


def debugger(folder: Path, **options: Any) -> PrecisionDebugger:
    return PrecisionDebugger(dump_path=folder, quiet=True, **options)


def forward(folder: Path, *, backward: bool = False, **options: Any) -> dict[str, Any]:
    tool, model = debugger(folder, **options), Net()
    x = torch.ones(2, 4, requires_grad=backward)
    with tool.start(model):
        result = model(x)
        if backward:
            result.sum().backward()
    return records(folder)


def test_levels_record_modules_apis_or_both(tmp_path: Path) -> None:
    modules = {
        "Module.block.fc.Linear.forward.0",
        "Module.block.norm.LayerNorm.forward.0",
        "Module.block.Block.forward.0",
        "Module.head.Linear.forward.0",
    }
    apis = {
        "Functional.linear.0.forward",
        "Functional.relu.0.forward",
        "Tensor.__mul__.0.forward",
        "Functional.layer_norm.0.forward",
        "Tensor.softmax.0.forward",
        "Tensor.__add__.0.forward",
        "Functional.linear.1.forward",
    }
    assert set(forward(tmp_path / "0", level="L0")) == modules
    assert set(forward(tmp_path / "1", level="L1")) == apis
    assert set(forward(tmp_path / "mix", level="mix")) == modules | apis


def test_construct_and_stack_say_where_a_call_came_from(tmp_path: Path) -> None:
    forward(tmp_path, level="mix")
    parents = json.loads((tmp_path / "step0/rank/construct.json").read_text())
    assert parents["Functional.relu.0.forward"] == "Module.block.Block.forward.0"
    assert parents["Module.block.fc.Linear.forward.0"] == "Module.block.Block.forward.0"
    assert parents["Tensor.softmax.0.forward"] is None
    stacks = json.loads((tmp_path / "step0/rank/stack.json").read_text())
    frames = next(frames for names, frames in stacks.values() if "Functional.relu.0.forward" in names)
    assert "in forward" in frames[0]
    assert "F.relu(self.fc(x))" in frames[0]


def test_backward_gradients_equal_autograds(tmp_path: Path) -> None:
    data = forward(tmp_path, level="mix", task="tensor", backward=True)
    model = Net()
    x = torch.ones(2, 4, requires_grad=True)
    hidden = model.block(x, scale=2.0)
    hidden.retain_grad()
    model.head(hidden + hidden.softmax(-1)).sum().backward()

    def saved(name: str) -> torch.Tensor:
        return torch.load(tmp_path / "step0/rank/dump_tensor_data" / name, weights_only=True)

    block = data["Module.block.Block.backward.0"]
    torch.testing.assert_close(saved(block["input"][0]["data_name"]), hidden.grad)
    torch.testing.assert_close(saved(block["output"][0]["data_name"]), x.grad)
    parameters = data["Module.head.Linear.parameters_grad.0"]
    torch.testing.assert_close(saved(parameters["weight"][0]["data_name"]), model.head.weight.grad)
    # linear: gradients of input, weight and bias, in the order of the arguments
    shapes = [entry["shape"] for entry in data["Functional.linear.0.backward"]["output"]]
    assert shapes == [[2, 4], [8, 4], [8]]


def test_dumping_changes_neither_results_nor_gradients(tmp_path: Path) -> None:
    def run(tool: PrecisionDebugger | None) -> list[torch.Tensor]:
        model = Net()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if tool is not None:
            tool.start(model)
        result = model(x)
        result.square().sum().backward()
        if tool is not None:
            tool.stop()
        return [result.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    for plain, dumped in zip(run(None), run(debugger(tmp_path, level="mix", task="tensor"))):
        assert torch.equal(plain, dumped)


def test_an_input_changed_in_place_is_recorded_as_it_was(tmp_path: Path) -> None:
    tool = debugger(tmp_path)
    x = torch.ones(3)
    with tool.start():
        x.mul_(2)
        x.add_(1)
    data = records(tmp_path)
    assert [data[f"Tensor.{name}.0.forward"]["input_args"][0]["Max"] for name in ("mul_", "add_")] == [1.0, 2.0]
    assert data["Tensor.add_.0.forward"]["output"][0]["Max"] == 3.0


def test_what_a_collective_wrote_is_recorded_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def double(tensor: torch.Tensor) -> None:
        # as a process group does: no version counter sees it
        tensor.numpy()[:] *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    x = torch.ones(3)
    for task in ("statistics", "tensor"):
        tool = debugger(tmp_path / task, task=task)
        with tool.start():
            y = x * 1
            torch.distributed.all_reduce(y)
            y + 0
        entry = records(tmp_path / task)["Tensor.__add__.0.forward"]["input_args"][0]
        assert entry["Max"] == 2.0
        if task == "tensor":
            saved = tmp_path / task / "step0/rank/dump_tensor_data" / entry["data_name"]
            assert torch.equal(torch.load(saved, weights_only=True), torch.full((3,), 2.0))


def test_steps_and_call_numbers(tmp_path: Path) -> None:
    tool, model = debugger(tmp_path, step=[1, "3-4"]), Net()
    for _ in range(5):
        with tool.start(model):
            model(torch.ones(1, 4))
            model(torch.ones(1, 4))
        tool.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step3", "step4"]
    assert "Functional.linear.3.forward" in records(tmp_path, 4)
    assert "steps outside [1, 3, 4] are not recorded" in str(tool.summary)


def test_a_rank_that_is_not_asked_for_says_so(tmp_path: Path) -> None:
    tool = debugger(tmp_path, rank=[4, 5])
    with tool.start():
        torch.ones(2) + 1
    assert not list(tmp_path.iterdir())
    assert "nothing is recorded on rank 0" in str(tool.summary)


def test_scope_list_and_token_range(tmp_path: Path) -> None:
    scope = ["Module.block.fc.Linear.forward.0", "Functional.layer_norm.0.forward"]
    names = list(forward(tmp_path / "scope", level="mix", scope=scope))
    assert names[0] == "Functional.linear.0.forward"
    assert [name for name in names if not name.startswith("Module")][-1] == scope[1]
    assert "Functional.linear.1.forward" not in names
    expanded = forward(tmp_path / "list", level="mix", list=["Module.block.Block"])
    assert "Functional.relu.0.forward" in expanded
    assert "Functional.linear.1.forward" not in expanded
    tool, model = debugger(tmp_path / "token", level="L0", token_range=[1, 1]), Net()
    with tool.start(model):
        for _ in range(3):
            model(torch.ones(1, 4))
    # call numbers count what was not dumped as well
    assert {name.rpartition(".")[2] for name in records(tmp_path / "token")} == {"1"}


def test_data_mode(tmp_path: Path) -> None:
    results = forward(tmp_path / "a", data_mode=["forward", "output"], backward=True)
    assert all(set(entry) == {"output"} for entry in results.values())
    gradients = forward(tmp_path / "b", data_mode=["backward"], backward=True)
    assert gradients
    assert all(name.endswith(".backward") for name in gradients)


def test_risk_levels(tmp_path: Path) -> None:
    def run(level: str) -> set[str]:
        tool = debugger(tmp_path / level, risk_level=level)
        with tool.start():
            x = torch.ones(2, 3).reshape(3, 2) + 1
            x @ x.t()
        return set(records(tmp_path / level))

    assert run("CORE") == {"Tensor.matmul.0.forward"}
    assert run("FOCUS") == {"Tensor.matmul.0.forward", "Tensor.__add__.0.forward"}
    assert "Tensor.reshape.0.forward" in run("ALL")


def test_nothing_stays_changed_after_stop_or_an_exception(tmp_path: Path) -> None:
    class Table:
        double = staticmethod(lambda x: x + x)

    table, model = Table(), Net()
    original, hooks = table.double, [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    reduce = torch.distributed.all_reduce
    tool = debugger(tmp_path, level="mix")
    tool.register_api(table, ["double"])

    def run() -> None:
        with tool.start(model):
            assert table.double is not original
            table.double(model(torch.ones(1, 4)))
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        run()
    assert table.double is original
    assert torch.distributed.all_reduce is reduce
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch._C._len_torch_function_stack() == 0
    data = records(tmp_path)
    # a registered function is one call, whatever runs inside
    assert "NPU.double.0.forward" in data
    assert "Tensor.__add__.1.forward" not in data


def test_a_model_that_raises_leaves_the_records_before_it(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) @ torch.ones(7, 7)

    tool, model = debugger(tmp_path, level="mix"), nn.Sequential(nn.Linear(4, 4), Broken())
    for _ in range(2):
        with pytest.raises(RuntimeError), tool.start(model):
            model(torch.ones(1, 4))
        tool.step()
    for step in range(2):
        data = records(tmp_path, step)
        assert "Tensor.__add__.0.forward" in data
        assert not any("matmul" in name for name in data)


def test_other_threads_are_counted(tmp_path: Path) -> None:
    tool, model = debugger(tmp_path, level="mix"), Net()
    with tool.start(model):
        thread = threading.Thread(target=lambda: model(torch.ones(1, 4)))
        thread.start()
        thread.join()
    assert "Module.head.Linear.forward.0" in records(tmp_path)
    assert "4 module calls ran in other threads" in str(tool.summary)


def test_compiled_functions_run_as_python_and_compile_once(tmp_path: Path) -> None:
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("torch can't run compiled functions as plain Python before 2.6")
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model = Net()
    function = torch.compile(lambda x: model(x).relu(), backend=backend)
    function(torch.ones(1, 4))
    tool = debugger(tmp_path)
    for _ in range(3):
        with tool.start(model):
            function(torch.ones(1, 4))
        tool.step()
        function(torch.ones(1, 4))
    assert compiled == 1
    assert "Functional.linear.1.forward" in records(tmp_path, 2)


def test_graph_level_names_nodes_like_eager_calls(tmp_path: Path) -> None:
    model = Net()
    tool = debugger(tmp_path / "graph", level="graph")
    function = torch.compile(model, backend=tool.compile_backend("eager"), fullgraph=True)
    expected = model(torch.ones(2, 4))
    torch.testing.assert_close(function(torch.ones(2, 4)), expected)
    with tool.start(model):
        torch.testing.assert_close(function(torch.ones(2, 4)), expected)
    assert "ran 1 graphs node by node" in str(tool.summary)
    graph = records(tmp_path / "graph")
    eager = forward(tmp_path / "eager", level="L1")
    assert set(eager) <= set(graph)
    parents = json.loads((tmp_path / "graph/step0/rank/construct.json").read_text())
    assert parents["Functional.relu.0.forward"] == "Module.block.Block.forward.0"


def test_graph_level_without_a_graph_says_why_it_is_empty(tmp_path: Path) -> None:
    tool = debugger(tmp_path, level="graph")
    with tool.start(Net()):
        pass
    assert "no graph ran: pass torch.compile(backend=debugger.compile_backend())" in str(tool.summary)


def test_the_older_spelling(tmp_path: Path) -> None:
    tool = PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", rank=0, quiet=True)
    tool.configure_hook(mode="api_stack", summary_only=True)
    tool.start()
    torch.ones(2) + 1
    tool.stop()
    assert records(tmp_path)["Tensor.__add__.0.forward"]["output"][0]["Max"] == 2.0
    assert (tool.config.task, tool.config.level, tool.config.rank) == ("statistics", "L1", [0])
    with pytest.raises(PrecisionError, match=r"no mode 'acl'; there are api_stack, all, list, range, module, mix"):
        tool.configure_hook(mode="acl")


def test_a_config_file_with_a_section_per_task(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"task": "tensor", "level": "mix", "rank": [], "tensor": {"list": ["relu"], "data_mode": ["all"]}})
    )
    config = PrecisionDebugger(path, dump_path=tmp_path, level="L1").config
    assert (config.task, config.level, config.list) == ("tensor", "L1", ["relu"])


def test_the_peers_switches_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "statistics", "level": "L1", "async_dump": True, "precision": "high"}))
    tool = PrecisionDebugger(path, dump_path=tmp_path / "on", quiet=True)
    with tool.start():
        torch.ones(2, 2) + 1
    # msprobe leaves mean and norm null here
    assert records(tmp_path / "on")["Tensor.__add__.0.forward"]["output"][0]["Norm"] == 4.0
    off = debugger(tmp_path / "off", dump_enable=False)
    with off.start():
        torch.ones(2) + 1
    assert not (tmp_path / "off").exists()
    assert "dump_enable is false" in str(off.summary)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tsk": "tensor"}, "no option tsk; there are async_dump, compress, data_mode, dump_enable, dump_path"),
        ({"task": "tensors"}, "task = 'tensors': there are statistics, tensor, structure"),
        ({"level": "L3"}, "level = 'L3': there are L0, L1, mix, graph"),
        ({"level": "L2"}, "there are L0, L1, mix, graph; kernels are recorded by the vendor's own dump"),
        ({"level": "debug"}, "there are L0, L1, mix, graph; single tensors are saved by torch.save"),
        ({"summary_mode": "xor"}, "there are statistics, md5; use 'md5'"),
        ({"precision": "medium"}, "precision = 'medium': there are high, low"),
        ({"data_mode": ["sideways"]}, "data_mode = 'sideways': there are all, forward, backward, input, output"),
        ({"scope": ["one"]}, "takes no names or two"),
        ({"token_range": [3, 1]}, "0 <= first <= last"),
        ({"rank": "0"}, "rank = '0'"),
        ({"task": "structure", "summary_mode": "md5"}, "reads no tensor"),
        ({"hook_name": "hook"}, "there are 'dump' and 'free_benchmark'"),
    ],
)
def test_a_wrong_option_names_the_valid_ones(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PrecisionError) as error:
        PrecisionDebugger(**options)
    assert message in str(error.value)


def test_misuse_is_refused(tmp_path: Path) -> None:
    tool = debugger(tmp_path, level="L0")
    with pytest.raises(PrecisionError, match="need the model"):
        tool.start()
    with tool.start(Net()), pytest.raises(PrecisionError, match="runs already"):
        tool.start(Net())
    again = debugger(tmp_path, level="L0")
    with pytest.raises(PrecisionError, match="holds a dump already"):
        again.start(Net())
    (tmp_path / "file").touch()
    with pytest.raises(PrecisionError, match="dump_path can't be written"):
        debugger(tmp_path / "file").start()
    # a start that failed leaves nothing behind
    assert torch._C._len_torch_function_stack() == 0
