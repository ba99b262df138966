"""Freezing the garbage collector: no collection inside, everything as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import padded_batch, tuned_model
from transformers import Qwen2ForCausalLM as StockQwen2
from transformers.generation.streamers import BaseStreamer

from npu_tuned_model.frozen_gc import frozen_gc


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


def collections_while(count: int) -> int:
    """How often the collector runs while `count` containers are made and kept."""
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    kept = [[] for _ in range(count)]
    gc.callbacks.pop()
    assert len(kept) == count
    return seen.count("start")


def test_nothing_is_collected_inside() -> None:
    assert collections_while(20_000) > 0
    with frozen_gc():
        assert collections_while(20_000) == 0
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_inside_puts_it_back() -> None:
    with pytest.raises(KeyError), frozen_gc():
        raise KeyError
    assert gc.isenabled()


def test_nested_and_disabled_by_the_caller() -> None:
    with frozen_gc():
        with frozen_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with frozen_gc():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize(("freeze", "sample"), [(True, False), (True, True), (False, False)])
def test_generation_holds_it_still(checkpoints: dict[str, tuple[StockQwen2, Path]], freeze: bool, sample: bool) -> None:
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    model.freeze_gc = freeze
    states: list[bool] = []

    class Watch(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            states.append(gc.isenabled())

        def end(self) -> None: ...

    ids, mask = padded_batch([5])
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=sample, streamer=Watch())
    # the prompt reaches the streamer before the first token is asked for
    assert states[1:] == [not freeze] * 3
    assert gc.isenabled()
