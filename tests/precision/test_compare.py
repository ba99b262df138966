"""Comparing dumps: the figures, the pairs, the verdicts, the ranks, the report and the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Net
from torch import Tensor, nn

from precision import PrecisionDebugger, PrecisionError
from precision.compare import compare_paths
from precision.compare.__main__ import main
from precision.compare.mapping import Rule, read_mapping
from precision.compare.metrics import CHUNK, tensor_errors
from precision.compare.ranks import combine
from precision.compare.verdict import judge_statistics


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-100, 100, width=32)] * 2), min_size=1, max_size=30))
def test_figures_equal_their_definitions(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs))
    errors = tensor_errors(ours, theirs)
    difference = (ours - theirs).abs()
    eps = torch.finfo(torch.float32).eps
    relative = torch.tensor(
        [d / (abs(b) if b else eps) for d, b in zip(difference.tolist(), theirs.tolist())], dtype=torch.float64
    )
    assert errors.max_abs == pytest.approx(difference.max().item())
    assert errors.euclidean == pytest.approx(difference.norm().item())
    assert errors.max_relative == pytest.approx(relative.max().item(), rel=1e-5)
    assert errors.mean_relative == pytest.approx(relative.mean().item(), rel=1e-5)
    assert errors.thousandth == pytest.approx((relative < 0.001).double().mean().item())
    assert errors.five_thousandths == pytest.approx((relative < 0.005).double().mean().item())
    if ours.norm() > 1e-6 and theirs.norm() > 1e-6:
        expected = torch.nn.functional.cosine_similarity(ours, theirs, dim=0).item()
        assert errors.cosine == pytest.approx(expected, abs=1e-9)
    assert errors.equal == (ours.tolist() == theirs.tolist())


def test_figures_of_special_tensors() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert tensor_errors(zeros, zeros).cosine == 1.0
    assert math.isnan(tensor_errors(ones, zeros).cosine)
    nan = torch.tensor([math.nan, math.inf, 1.0])
    assert tensor_errors(nan, nan).equal
    assert tensor_errors(nan, torch.tensor([math.nan, -math.inf, 1.0])).misplaced == 1
    assert tensor_errors(torch.empty(0), torch.empty(0)).equal
    assert tensor_errors(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])).max_abs == 2.0
    long = torch.zeros(CHUNK + 5)
    other = long.clone()
    other[-1] = 1.0
    assert tensor_errors(other, long).max_abs == 1.0
    with pytest.raises(ValueError, match="shapes differ"):
        tensor_errors(zeros, torch.zeros(4))


def dump(folder: Path, model: nn.Module, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    tool = PrecisionDebugger(dump_path=folder, quiet=True, **{"level": "mix", "task": "tensor", **options})
    model = model.to(dtype)
    with tool.start(model):
        model(torch.linspace(-1, 1, 8).reshape(2, 4).to(dtype))
    return folder


class Faulty(Net):
    """Net whose norm's result is off by 1 %."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x, scale=2.0) * 1.01
        return self.head(hidden + hidden.softmax(-1))


def test_equal_dumps_are_the_same(tmp_path: Path) -> None:
    comparison = compare_paths(dump(tmp_path / "a", Net()), dump(tmp_path / "b", Net()))
    assert comparison.passed
    assert set(comparison.counts) == {"same"}
    assert comparison.first_divergence() is None


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_the_first_divergence_is_the_call_whose_inputs_agree(task: str, tmp_path: Path) -> None:
    golden = Net()
    faulty = Net()
    with torch.no_grad():
        faulty.block.norm.weight[3] *= 1.5
    comparison = compare_paths(dump(tmp_path / "a", golden, task=task), dump(tmp_path / "b", faulty, task=task))
    first = comparison.first_divergence()
    assert first is not None
    assert not comparison.passed
    # the weight is an input of the API that uses it, and so what differs first is the weight itself
    assert first.target.startswith(("Functional.layer_norm.0.forward", "Module.block.norm"))


def test_dtypes_have_tolerances_of_their_own(tmp_path: Path) -> None:
    golden = dump(tmp_path / "a", Net())
    low = dump(tmp_path / "b", Net(), dtype=torch.bfloat16)
    assert compare_paths(golden, low).passed
    assert not compare_paths(golden, low, tolerance=1e-5).passed


def test_more_calls_on_one_side_shift_nothing(tmp_path: Path) -> None:
    # an additional multiplication at the top: the modules' own calls still find their partners
    comparison = compare_paths(dump(tmp_path / "a", Net()), dump(tmp_path / "b", Faulty()))
    assert comparison.counts["unmatched"] == 2
    same = {row.address for row in comparison.rows if row.verdict == "same"}
    assert "block/__mul__" in same
    first = comparison.first_divergence()
    assert first is not None
    assert first.address in ("/softmax", "/__add__")


def test_statistics_verdicts() -> None:
    meta = {"Max": 2.0, "Min": -4.0, "Mean": 1e-9, "Norm": 10.0, "shape": [3]}
    assert judge_statistics(meta, meta, 1e-4)[0] == "same"
    # a mean near zero is held against the values' scale
    assert judge_statistics({**meta, "Mean": 3e-9}, meta, 1e-4)[0] == "close"
    assert judge_statistics({**meta, "Norm": 10.1}, meta, 1e-4) == ("different", pytest.approx(0.01))
    assert judge_statistics({**meta, "nan_count": 1, "inf_count": 0}, meta, 1.0)[0] == "same"
    counts = {"nan_count": 1, "inf_count": 0}
    assert judge_statistics({**meta, **counts}, {**meta, "nan_count": 2, "inf_count": 0}, 1.0)[0] == "different"
    nothing = dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    assert judge_statistics({**nothing, "shape": [2]}, {**nothing, "shape": [2]}, 1.0)[0] == "unknown"
    assert judge_statistics({**meta, "md5": "0a"}, {**meta, "md5": "0a"}, 0.0)[0] == "same"


class Renamed(nn.Module):
    """Net with other names, fused weights and a flattened batch."""

    def __init__(self) -> None:
        super().__init__()
        source = Net()
        self.body = source.block
        self.out = nn.Linear(8, 6)
        with torch.no_grad():
            self.out.weight.copy_(torch.cat([source.head.weight] * 2))
            self.out.bias.copy_(torch.cat([source.head.bias] * 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x, scale=2.0)
        return self.out(hidden + hidden.softmax(-1))


def test_a_mapping_joins_other_names_and_parts(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(
        "- {golden: block, target: body}\n"
        "- {golden: 'head:output.0', target: 'out:output.0', target_slice: [-1, 3, 6]}\n"
    )
    golden, target = dump(tmp_path / "a", Net()), dump(tmp_path / "b", Renamed())
    comparison = compare_paths(golden, target, read_mapping(path))
    matched = {row.golden: row for row in comparison.rows if row.target}
    assert matched["Module.block.fc.Linear.forward.0.parameters.weight"].verdict == "same"
    assert matched["Module.head.Linear.forward.0.output.0"].verdict in ("same", "close")
    assert compare_paths(golden, target).counts["unmatched"] > 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("golden: a", "must be a list of rules"),
        ("- {golden: a}", "keys: golden, target, golden_slice"),
        ("- {golden: a, target: b, slice: 3}", "keys: golden, target"),
        ("- [", "can't be understood"),
    ],
)
def test_a_wrong_mapping_is_explained(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(PrecisionError, match=message):
        read_mapping(path)


def test_rules_with_placeholders() -> None:
    rule = Rule(golden="layers.{n}.q:output.0", target="blocks.{n}.qkv:output.0")
    assert rule.target_of("layers.12.q:output.0") == "blocks.12.qkv:output.0"
    assert rule.target_of("layers.1.2.q:output.0") is None
    module = Rule(golden="encoder", target="backbone")
    assert module.target_of("encoder.1/linear") == "backbone.1/linear"
    assert module.target_of("encoders") is None


def test_ranks_are_put_together() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(combine(list(whole.split(2, dim=0)), [4, 6])[0], whole)
    joined, how = combine(list(whole.split(3, dim=1)), [4, 6])
    assert torch.equal(joined, whole)
    assert how == "joined along dimension 1"
    assert combine([whole, whole], [4, 6])[1] == "replicated"
    summed, how = combine([whole, whole + 1], [4, 6])
    assert how == "summed"
    assert torch.equal(summed, 2 * whole + 1)
    # q of both ranks, then k, then v
    fused = [torch.tensor([0.0, 1, 10, 20]), torch.tensor([2.0, 3, 11, 21])]
    assert combine(fused, [8], sections=[2, 1, 1])[0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert combine(fused, [5])[1] == ""


def test_two_ranks_against_one_process(tmp_path: Path) -> None:
    golden = dump(tmp_path / "a", Net(), level="L0", list=["head"])
    for rank in range(2):
        net = Net()
        part = nn.Linear(8, 3)
        part.weight = nn.Parameter(net.head.weight[:, rank * 4 : rank * 4 + 4])
        folder = dump(tmp_path / f"rank{rank}", net, level="L0", list=["head"]) / "step0" / "rank"
        data = json.loads((folder / "dump.json").read_text())
        record = data["data"]["Module.head.Linear.forward.0"]
        half = torch.load(folder / "dump_tensor_data" / record["input_args"][0]["data_name"])[
            :, rank * 4 : rank * 4 + 4
        ]
        partial = half @ part.weight.T + (net.head.bias if rank == 0 else 0)
        for entry, value in (
            (record["input_args"][0], half),
            (record["output"][0], partial.detach()),
            (record["parameters"]["weight"], part.weight.detach().clone()),
        ):
            entry["shape"] = list(value.shape)
            torch.save(value.contiguous(), folder / "dump_tensor_data" / entry["data_name"])
        (folder / "dump.json").write_text(json.dumps(data))
        target = tmp_path / "b" / "step0" / f"rank{rank}"
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
    comparison = compare_paths(golden / "step0", tmp_path / "b" / "step0")
    assert comparison.passed
    how = {row.place: row.message for row in comparison.rows}
    assert how["input.0"] == "joined along dimension 1"
    assert how["output.0"] == "summed"
    assert how["parameters.bias"] == "replicated"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_its_status_and_its_files(tmp_path: Path) -> None:
    golden, target = dump(tmp_path / "a", Net()), dump(tmp_path / "b", Faulty())
    options = ["--golden", golden, "--target", target, "--output", tmp_path / "o"]
    result = run(*options)
    assert result.exit_code == 1
    assert "first divergence: " in result.output
    with (tmp_path / "o" / "compare_result.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"Cosine", "MeanRelativeErr", "Five Thousandths Err Ratio", "Verdict"} <= set(rows[0])
    assert {row["Verdict"] for row in rows} == {"same", "different", "unmatched"}
    page = (tmp_path / "o" / "compare_result.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert "<script src" not in page
    assert "<link" not in page
    assert "Module.head.Linear.forward.0.output.0" in page
    assert run(*options).exit_code == 2
    assert run(*options, "--force").exit_code == 1
    assert run("--golden", golden, "--target", golden, "--output", tmp_path / "p").exit_code == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    golden = dump(tmp_path / "a", Net())
    for target, message in (
        (tmp_path / "nothing", "no dump.json under"),
        (tmp_path, "no dump.json under"),
    ):
        result = run("--golden", golden, "--target", target, "--output", tmp_path / "o")
        assert result.exit_code == 2
        assert result.output.startswith("Error: ")
        assert message in result.output
        assert result.output.count("\n") == 1
    broken = tmp_path / "broken.json"
    broken.write_text('{"data": 3}')
    assert "has no object 'data'" in run("--golden", golden, "--target", broken, "--output", tmp_path / "o").output
    file = next((golden / "step0/rank/dump_tensor_data").glob("*.pt"))
    file.write_bytes(b"not a tensor")
    assert "can't be read as a tensor" in run("--golden", golden, "--target", golden, "--output", tmp_path / "o").output


def test_dumps_without_a_common_tensor_do_not_pass(tmp_path: Path) -> None:
    comparison = compare_paths(
        dump(tmp_path / "a", nn.Sequential(nn.Linear(4, 3))), dump(tmp_path / "b", Net(), level="L0")
    )
    assert comparison.matched == 0
    assert not comparison.passed


def test_a_file_outside_the_dump_is_not_read(tmp_path: Path) -> None:
    golden = dump(tmp_path / "a", Net())
    path = golden / "step0/rank/dump.json"
    path.write_text(path.read_text().replace('"data_name": "', '"data_name": "../../../../'))
    assert all(row.errors is None for row in compare_paths(golden, golden).rows)
