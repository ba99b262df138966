"""What one prefill and one decode step have to do at least: bytes to read, operations, sums over ranks. Exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import Qwen2Config

from npu_tuned_model.checkpoint_layout import (
    EMBEDDING,
    FLOATS,
    VOCABULARY,
    WHOLE,
    Quantised,
    Shard,
    parameter_names,
    pieces_of,
    shape_of,
    split_name,
)


@dataclass(frozen=True)
class Work:
    """The work of one rank, whoever does it.

    Attributes:
        weight_bytes: all weights.
        step_weight_bytes: weights that one decode step reads (an untied embedding table is only looked up).
        kv_bytes_per_token: keys and values of one token in one row.
        prefill_flops: the matmuls of the layers, causal attention and the output layer for each row's last token.
        decode_flops: the same matmuls for one token per row, without attention.
        sums_per_step: sums over the ranks in one step, without the one of the logits; none on one rank.
    """

    weight_bytes: int
    step_weight_bytes: int
    kv_bytes_per_token: int
    prefill_flops: int
    decode_flops: int
    sums_per_step: int

    def decode_bytes(self, tokens_in_cache: float) -> float:
        """Bytes a decode step reads with so many tokens in the cache over all rows."""
        return self.step_weight_bytes + tokens_in_cache * self.kv_bytes_per_token


def work_of(
    config: Qwen2Config,
    *,
    dtype: torch.dtype,
    batch: int,
    length: int,
    shard: Shard = WHOLE,
    quantised: Quantised = FLOATS,
) -> Work:
    """The work of one rank for `batch` prompts of `length` tokens (padding included: it is computed too).

    Args:
        dtype: of the activations, and of all weights but those that `quantised` says are int8.
    """
    names = parameter_names(config, quantised)
    counts = {name: math.prod(shape_of(pieces_of(name, config, shard))) for name in names}
    sizes = {name: count * (1 if quantised.holds(name) else dtype.itemsize) for name, count in counts.items()}
    tables = {
        module: sum(size for name, size in sizes.items() if split_name(name)[0] == module) for module in VOCABULARY
    }
    embedding, head = tables.values()
    weight_bytes = sum(sizes.values()) - (head if config.tie_word_embeddings else 0)
    matmuls = sum(count for name, count in counts.items() if name.endswith(("proj.weight", "qkv.weight")))
    table = counts[EMBEDDING]
    head_dim = config.hidden_size // config.num_attention_heads
    kv_heads = max(config.num_key_value_heads // shard.size, 1)
    layers, local_width = config.num_hidden_layers, config.hidden_size // shard.size
    attention = 4 * local_width * (length * (length + 1) // 2)
    return Work(
        weight_bytes=weight_bytes,
        step_weight_bytes=weight_bytes - (0 if config.tie_word_embeddings else embedding),
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * dtype.itemsize,
        prefill_flops=batch * (2 * length * matmuls + layers * attention + 2 * table),
        decode_flops=batch * 2 * (matmuls + table),
        sums_per_step=0 if shard.size == 1 else 1 + 2 * layers,
    )
