"""A model on the NPU that has memory and no values: enough to build its graphs, for any size of model."""

from __future__ import annotations

import copy

import torch
from transformers import Qwen2Config

from npu_tuned_model.linear_int8 import hold_int8
from npu_tuned_model.load import pack_weights
from npu_tuned_model.modeling_qwen2 import Qwen2ForCausalLM
from npu_tuned_model.tuning import TuningOptions


def unset_model(
    config: Qwen2Config,
    layers: int,
    options: TuningOptions | None = None,
    dtype: torch.dtype = torch.bfloat16,
    model_class: type[Qwen2ForCausalLM] = Qwen2ForCausalLM,
    *,
    int8: bool = False,
) -> Qwen2ForCausalLM:
    """A model of this configuration with `layers` layers, its weights laid out as loading lays them out.

    Args:
        int8: whether its weights are int8, those of embedding and output layer included.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    device = torch.device("npu")
    with torch.device("meta"):
        model = model_class(config, options)
        if int8:
            hold_int8(model, embeddings=True)
        model = pack_weights(model.to(dtype), device)
    model = model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary.fill(device, dtype)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def run_steps(model: Qwen2ForCausalLM, *, batch: int, prompt: int, capacity: int, decode_steps: int) -> None:
    """One prefill, then decode steps, of rows of different lengths; no value is looked at."""
    cache = model.new_cache(batch, capacity)
    padded = model.steps.padded_length(prompt)
    ids = torch.zeros(batch, padded, dtype=torch.int64).to("npu")
    last_rows = torch.zeros(batch, dtype=torch.int64).to("npu") if model.options.last_token_logits else None
    model.steps.prefill(ids, model.model.rotary.prompt(batch, padded), last_rows, cache)
    cache.start([max(prompt - row, 1) for row in range(batch)])
    for _ in range(decode_steps):
        model.steps.decode(ids[:, :1], cache.positions, cache.decode_window(), cache)
        cache.advance()
