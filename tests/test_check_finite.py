"""The first module whose result holds NaN or Inf is named, the innermost one, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import padded_batch, tuned_model
from torch import nn
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import Qwen2ForCausalLM, TuningOptions
from npu_tuned_model.check_finite import FiniteCheck
from npu_tuned_model.errors import UserError


@pytest.fixture
def model(checkpoints: dict[str, tuple[StockQwen2, Path]]) -> Qwen2ForCausalLM:
    # plain weights, so that a test can put a NaN into one
    return tuned_model(checkpoints["gqa_4_2_head_16"][1], TuningOptions(packed_weights=False))


def hooks_left(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_finite_results_pass_through_a_whole_generation(model: Qwen2ForCausalLM) -> None:
    ids, mask = padded_batch([5, 9])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with FiniteCheck(model):
        checked = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(checked, expected)
    assert hooks_left(model) == 0


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.0.post_attention_layernorm",
        "model.norm",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_layer_is_named(model: Qwen2ForCausalLM, name: str, value: float) -> None:
    model.get_submodule(name).weight.data.fill_(value)
    ids, mask = padded_batch([5, 9])
    with pytest.raises(UserError, match=rf"NaN or Inf in {name} \("), FiniteCheck(model):
        model(ids, attention_mask=mask)
    assert hooks_left(model) == 0


def test_a_module_that_computes_by_itself_is_named_when_its_parts_are_fine() -> None:
    class Overflow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"results": [torch.ones(2, dtype=torch.int64), self.inner(x) * 70000]}

    model = nn.Sequential(Overflow())
    with FiniteCheck(model):
        model(torch.ones(2))
        with pytest.raises(UserError, match=r"NaN or Inf in 0 \(Overflow\): its result holds Inf in float16"):
            model(torch.ones(2, dtype=torch.float16))


def test_a_compiled_model_is_refused(model: Qwen2ForCausalLM) -> None:
    model.run_graph()
    with pytest.raises(UserError, match="eager mode"), FiniteCheck(model):
        pass
    assert hooks_left(model) == 0
