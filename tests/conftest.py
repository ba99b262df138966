"""Fixtures that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, weights_of, write_checkpoint
from models import SHAPES, save, stock_model, tiny_config
from torch import Tensor
from transformers import Qwen2ForCausalLM as StockQwen2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs of one test don't count in the next."""
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[StockQwen2, Path]]:
    """One stock model and its saved checkpoint per shape, made when first asked for."""
    return _Checkpoints(tmp_path_factory)


class _Checkpoints(dict):
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self.factory = factory

    def __missing__(self, shape: str) -> tuple[StockQwen2, Path]:
        assert shape in SHAPES
        model = stock_model(tiny_config(shape))
        self[shape] = (model, save(model, self.factory.mktemp(shape)))
        return self[shape]


@pytest.fixture
def untied(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A good checkpoint in two shards, q and k in the first and v in the second, to be damaged by a test."""
    config = config_of(layers=1)
    weights = weights_of(config)
    second = {name: weights[name] for name in weights if ".v_proj." in name or ".mlp." in name}
    first = {name: weights[name] for name in weights if name not in second}
    return write_checkpoint(tmp_path / "model", config, [first, second]), weights
