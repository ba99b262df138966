"""A small network to be watched, and readers of what the monitor writes."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OPS = ("norm", "min", "max", "mean", "zeros", "nans")
EVERYTHING: dict[str, Any] = {
    "all_xy": True,
    "xy_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "param_distribution": True,
}


class Branches(nn.Module):
    """Takes and gives two tensors; the first goes into both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y) + x


class Net(nn.Module):
    """(batch, width) to (batch, 3), with a residual, an in-place ReLU and a module that gives back its input."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.branches = Branches(width)
        self.head = nn.Linear(width, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.same(self.relu(self.fc(x)) * 2)
        left, right = self.branches(hidden, hidden)
        return self.head(left + right + hidden)


def batches(count: int, dtype: torch.dtype = torch.float32, width: int = 4, rows: int = 5) -> list[Tensor]:
    """Inputs that differ from step to step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(count)]


def loss_of(result: Tensor) -> Tensor:
    return F.cross_entropy(result.float(), torch.zeros(result.shape[0], dtype=torch.long))


def figures(tensor: Tensor, eps: float = 1e-8) -> dict[str, float]:
    """What the monitor must say of a tensor, the plain way in float64."""
    values = tensor.detach().double().flatten()
    return {
        "norm": float(values.norm()),
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "zeros": float((values.abs() < eps).double().mean()),
        "nans": float(values.isnan().sum()),
    }


def read(folder: Path, kind: str, step: int | None = None) -> list[dict[str, Any]]:
    """The rows of a kind, of one step or all, in the files' order."""
    paths = sorted(
        folder.glob(f"{kind}_[0-9]*-*.csv"), key=lambda path: int(path.stem.rpartition("_")[2].split("-")[0])
    )
    rows = [row for path in paths for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    return [row for row in rows if step is None or int(row["step"]) == step]


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by name; each name must be there once."""
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def assert_row(row: dict[str, Any], tensor: Tensor) -> None:
    """A row must say what a plain recomputation says, to the digits that are written."""
    expected = figures(tensor)
    for op in OPS:
        found = float(row[op])
        if math.isnan(expected[op]):
            assert math.isnan(found), (row, op)
        else:
            scale = 1e-4 * max(abs(expected["min"]), abs(expected["max"])) if op == "mean" else 0.0
            assert math.isclose(found, expected[op], rel_tol=2e-5, abs_tol=scale + 1e-12), (row, op, expected)
    assert row["shape"] == str(list(tensor.shape))
    assert row["dtype"] == str(tensor.dtype)
