"""What the tests on stub libraries share: configurations, and the simulated device for what runs outside a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen2Config

from npu_tuned_model.simulate.device import SimulatedDevice


@pytest.fixture
def device() -> Iterator[None]:
    """Operators on npu tensors are computed by the host while the test runs."""
    with SimulatedDevice():
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def small() -> Qwen2Config:
    """A layer of Qwen2-0.5B."""
    return layer_config(896, 4864, 14, 2, tied=True)


def layer_config(hidden: int, intermediate: int, heads: int, kv_heads: int, *, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        sliding_window=4096,
        tie_word_embeddings=tied,
    )


# layers of Qwen2-0.5B and Qwen2-7B
SHAPES = {"0.5B": layer_config(896, 4864, 14, 2, tied=True), "7B": layer_config(3584, 18944, 28, 4, tied=False)}
