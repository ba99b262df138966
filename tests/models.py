"""Tiny models that tests share: stock transformers as the reference, and the tuned model with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import Qwen2ForCausalLM, TuningOptions, load_model

VOCABULARY = 320
# heads, kv heads, head size, tied embeddings: the shapes of the published models, few layers, narrow feed-forward
SHAPES = {
    "gqa_14_2_head_64": (14, 2, 64, True),
    "gqa_28_4_head_128": (28, 4, 128, False),
    "gqa_12_2_head_128": (12, 2, 128, True),
    "mha_4_head_64": (4, 4, 64, False),
    "gqa_4_2_head_16": (4, 2, 16, False),
}


def tiny_config(shape: str = "gqa_4_2_head_16", layers: int = 2, context: int = 1024) -> Qwen2Config:
    heads, kv_heads, head_dim, tied = SHAPES[shape]
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=heads * head_dim,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        sliding_window=context,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def stock_model(config: Qwen2Config, seed: int = 0) -> StockQwen2:
    """Random weights, the biases included (transformers starts them at zero, which would hide a lost bias)."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = StockQwen2(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed_tokens" not in name and "lm_head" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def save(model: StockQwen2, folder: Path) -> Path:
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def tuned_model(folder: Path, options: TuningOptions | None = None, dtype: str = "float32") -> Qwen2ForCausalLM:
    return load_model(folder, device="cpu", dtype=dtype, options=options)


def padded_batch(lengths: list[int], seed: int = 0, side: str = "left") -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths as (input_ids, attention_mask)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(None, length)
        ids[row, place] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        mask[row, place] = 1
    return ids, mask


@torch.no_grad()
def stock_logits(model: StockQwen2, ids: Tensor, mask: Tensor, new_ids: Tensor) -> Tensor:
    """Logits of the last prompt token and of every new token, (batch, 1 + new, vocabulary), in one stock forward."""
    all_ids = torch.cat([ids, new_ids], dim=1)
    all_mask = torch.cat([mask, torch.ones_like(new_ids)], dim=1)
    positions = (all_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(all_ids, attention_mask=all_mask, position_ids=positions).logits
    return logits[:, ids.shape[1] - 1 :]


@torch.no_grad()
def tuned_logits(model: Qwen2ForCausalLM, ids: Tensor, mask: Tensor | None, new_ids: Tensor) -> Tensor:
    """The same from a prefill and one decode step per new token."""
    cache = model.new_cache(ids.shape[0], ids.shape[1] + new_ids.shape[1])
    steps = [model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]]
    for column in range(new_ids.shape[1]):
        steps.append(model(new_ids[:, column : column + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(steps, dim=1)
