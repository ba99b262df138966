"""Faults planted in the low-precision kernels of an attention network: nearly all are found, nothing else is."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision import PrecisionDebugger

LAYERS, WIDTH, HEADS, TOKENS = 12, 128, 4, 48
NARROW = (torch.bfloat16, torch.float16)


def right_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return (
        (scores.float() + mask.float()).softmax(-1).to(scores.dtype)
        if scores.dtype in NARROW
        else (scores + mask).softmax(-1)
    )


def without_maximum(scores: Tensor, mask: Tensor) -> Tensor:
    values = (scores + mask).exp()
    return values / values.sum(-1, keepdim=True)


def transposed_mask(scores: Tensor, mask: Tensor) -> Tensor:
    return right_softmax(scores, mask.mT)


def right_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def low_precision_accumulation(x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    for k in range(x.shape[-1]):
        total = total + x[..., k : k + 1] * weight[:, k]
    return total


def wrong_first_chunk(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(*args: Tensor) -> Tensor:
        result = function(*args).contiguous()
        result.view(-1)[:32] = 0.5
        return result

    return kernel


def off_by_one_percent(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*args) * 1.01


SOFTMAX_FAULTS = {
    "without the maximum": without_maximum,
    "transposed mask": transposed_mask,
    "wrong first chunk": wrong_first_chunk(right_softmax),
    "scale": off_by_one_percent(right_softmax),
}
LINEAR_FAULTS = {
    "low-precision accumulation": low_precision_accumulation,
    "wrong first chunk": wrong_first_chunk(right_linear),
    "scale": off_by_one_percent(right_linear),
}


class Kernels:
    """The network's two operators; those of the given layer go to a faulty kernel in low precision."""

    def __init__(self, softmax: Any = right_softmax, linear: Any = right_linear, layer: int = -1) -> None:
        self._faulty = layer
        self._softmax, self._linear = softmax, linear
        self.layer = 0

    def softmax(self, scores: Tensor, mask: Tensor) -> Tensor:
        faulty = self.layer == self._faulty and scores.dtype in NARROW
        return (self._softmax if faulty else right_softmax)(scores, mask)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        faulty = self.layer == self._faulty and x.dtype in NARROW
        return (self._linear if faulty else right_linear)(x, weight)


class Network(nn.Module):
    """Causal attention with sharp heads: its logits pass what a 16-bit exponential can hold."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernels = kernels
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((TOKENS, TOKENS), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        for number, weights in enumerate(self.weights):
            self.kernels.layer = number
            normed = F.layer_norm(x, (WIDTH,))
            q, k, v = (
                self.kernels.linear(normed, weights[n]).view(TOKENS, HEADS, -1).transpose(0, 1) for n in range(3)
            )
            attention = self.kernels.softmax(q @ k.mT * 8, mask)
            x = x + self.kernels.linear((attention @ v).transpose(0, 1).reshape(TOKENS, WIDTH), weights[3])
        return x


def check(folder: Path, kernels: Kernels, dtype: torch.dtype, mode: str = "improve_precision") -> list[dict[str, str]]:
    tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", pert_mode=mode, quiet=True)
    tool.register_api(kernels, ["softmax", "linear"])
    model = Network(kernels).to(dtype)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad(), tool.start(model):
        model(x)
    with open(folder / "step0/rank/free_benchmark_calls.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dtype", NARROW)
def test_planted_faults_are_found_where_they_are_and_nowhere_else(tmp_path: Path, dtype: torch.dtype) -> None:
    planted = found = 0
    false_alarms: list[str] = []
    trials = [("softmax", name, fault) for name, fault in SOFTMAX_FAULTS.items()]
    trials += [("linear", name, fault) for name, fault in LINEAR_FAULTS.items()]
    for number, ((op, _, fault), layer) in enumerate(itertools.product(trials, (1, 4, 9))):
        rows = check(tmp_path / str(number), Kernels(**{op: fault}, layer=layer), dtype)
        per_layer = 1 if op == "softmax" else 4
        for row in rows:
            api, _, call = row["api_name"].rpartition(".")
            faulty = api == f"NPU.{op}" and int(call) // per_layer == layer
            flagged = row["verdict"] == "wrong kernel"
            planted += faulty
            found += faulty and flagged
            if flagged and not faulty:
                false_alarms.append(f"{row['api_name']} {row['reason']}")
    assert planted == 3 * (4 + 3 * 4)
    assert found >= 0.95 * planted, f"{found} of {planted}"
    assert not false_alarms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu", "no_change", "round_mode"])
def test_the_same_network_without_faults_is_not_flagged(tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    rows = check(tmp_path, Kernels(), dtype, mode)
    assert {row["verdict"] for row in rows} <= {"ok", "not checked"}
    assert sum(row["verdict"] == "ok" for row in rows) >= 0.9 * len(rows)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("faulty", [True, False])
def test_sums_rounded_on_the_way_are_found(tmp_path: Path, dtype: torch.dtype, faulty: bool) -> None:
    def rounded(x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype not in NARROW:
            return F.linear(x, weight)
        blocks = zip(x.split(32, -1), weight.split(32, -1))
        return sum((F.linear(*block) for block in blocks), start=torch.zeros((), dtype=x.dtype))

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 512, generator=generator), torch.randn(256, 512, generator=generator)
    kernels = SimpleNamespace(linear=rounded if faulty else F.linear)
    tool = PrecisionDebugger(dump_path=tmp_path, task="free_benchmark", quiet=True, list=["NPU.linear"])
    tool.register_api(kernels, ["linear"])
    with tool.start():
        kernels.linear(x.to(dtype), weight.to(dtype))
    with open(tmp_path / "step0/rank/free_benchmark_calls.csv") as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["wrong kernel" if faulty else "ok"]
