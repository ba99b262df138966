"""A small network with nested modules, several APIs and a second branch, and a reader of dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(F.relu(self.fc(x)) * scale)


class Net(nn.Module):
    """(batch, 4) to (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x, scale=2.0)
        return self.head(hidden + hidden.softmax(-1))


def records(folder: Path, step: int = 0, who: str = "rank") -> dict[str, Any]:
    """The data of one step's dump.json, read as strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    path = folder / f"step{step}" / who / "dump.json"
    return dict(json.loads(path.read_text(), parse_constant=refuse)["data"])
