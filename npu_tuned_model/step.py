"""What every layer needs for one step, made once per step and handed down as one object.

Legend: B batch, S prompt length, N heads, KVN kv heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from npu_tuned_model.chip import FIA
from npu_tuned_model.kv_cache import FixedKVCache, GrowingKVCache, KVCache, Window
from npu_tuned_model.ops import fused_attention
from npu_tuned_model.tuning import OpTable


@dataclass
class PrefillStep:
    """Prefill: the prompts, without padding in front, attend to themselves.

    Attributes:
        attention: npu_prompt_flash_attention, or what serves its calls.
        cos, sin: (B, S, 1, D), dtype of the model.
    """

    attention: Callable[..., Tensor]
    cache: KVCache
    cos: Tensor
    sin: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of `layer`; query (B, S, N, D), key and value (B, S, KVN, D) to (B, S, N, D)."""
        self.cache.write_prompt(layer, key, value)
        return self.attention(
            query,
            key,
            value,
            atten_mask=self.cache.causal_mask,
            num_heads=query.shape[2],
            scale_value=1.0 / math.sqrt(query.shape[3]),
            input_layout="BSND",
            num_key_value_heads=key.shape[2],
            sparse_mode=3,
        )


@dataclass
class DecodeStep:
    """Decode: one new token per row attends to the row's tokens in the cache.

    Attributes:
        attention: npu_incre_flash_attention, or what serves its calls.
        cos, sin: (B, 1, 1, D), dtype of the model.
        positions: (B,) int64, the slot that the new token goes into.
        window: cache.decode_window().
        visible: which slots of each row are filled, new token included: {"actual_seq_lengths": (B,) int64, or a list
            of integers} or {"atten_mask": (B, 1, 1, slots) bool, True where masked out}.
    """

    attention: Callable[..., Tensor]
    cache: KVCache
    cos: Tensor
    sin: Tensor
    positions: Tensor
    window: Window
    visible: dict[str, Any]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of `layer`; query (B, 1, N, D), key and value (B, 1, KVN, D) to (B, 1, N, D)."""
        keys, values = self.cache.append(layer, key, value, self.positions, self.window)
        return self.attention(
            query,
            keys,
            values,
            **self.visible,
            num_heads=query.shape[2],
            scale_value=1.0 / math.sqrt(query.shape[3]),
            input_layout="BSND",
            num_key_value_heads=key.shape[2],
        )


class RotaryTable(torch.nn.Module):
    """Cosines and sines of the rotary position embedding (arXiv 2104.09864), half layout, one row per position.

    Computed in float32 and rounded once to the model's dtype.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.positions, self.theta = head_dim, positions, theta
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.fill(torch.device("cpu"), torch.get_default_dtype())

    def fill(self, device: torch.device, dtype: torch.dtype) -> None:
        """(Re)compute the table, (positions, 1, 1, head_dim) each, on `device` in `dtype`."""
        with torch.device("cpu"):
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
            angles = torch.outer(torch.arange(self.positions, dtype=torch.int64).float(), self.theta**-exponents)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        self.cos = angles.cos().to(device=device, dtype=dtype)
        self.sin = angles.sin().to(device=device, dtype=dtype)

    def prompt(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows 0..length-1 for every sequence, (batch, length, 1, head_dim) each."""
        cos, sin = (
            table[:length].transpose(0, 1).expand(batch, -1, -1, -1).contiguous() for table in (self.cos, self.sin)
        )
        return cos, sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each position, (batch,) to (batch, 1, 1, head_dim) each."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def prefill_step(op_table: OpTable, rotary: tuple[Tensor, Tensor], cache: KVCache) -> PrefillStep:
    """The step for prompts padded (behind); `rotary` is RotaryTable.prompt() of their batch and length."""
    fused = cache.plan.prompt == FIA
    return PrefillStep(fused_attention.prompt if fused else op_table.prompt_flash_attention, cache, *rotary)


def decode_step(
    op_table: OpTable, rotary: RotaryTable, cache: KVCache, positions: Tensor, window: Window
) -> DecodeStep:
    """The step for one new token per row; `window` is what cache.decode_window() gave."""
    fused = cache.plan.decode == FIA
    attention = fused_attention.incremental if fused else op_table.incre_flash_attention
    cos, sin = rotary.at(positions)
    return DecodeStep(attention, cache, cos, sin, positions, window, _visible(cache, positions, window))


def _visible(cache: KVCache, positions: Tensor, window: Window) -> dict[str, Any]:
    if isinstance(cache, GrowingKVCache):
        assert isinstance(window, Tensor)
        return {"atten_mask": window[:, None, None, :]}
    if isinstance(window, list):
        return {"actual_seq_lengths": [row.shape[0] for row in window]}
    if cache.plan.lengths == "mask":
        assert isinstance(cache, FixedKVCache)
        return {"atten_mask": (cache.slot_numbers > positions[:, None])[:, None, None, :]}
    return {"actual_seq_lengths": cache.filled}


def run_layer(layer: torch.nn.Module, hidden: Tensor, residual: Tensor | None, step: Any) -> tuple[Tensor, Tensor]:
    """Call one layer. A function of its own, so that a compiler can be told that it is the same for every layer."""
    return layer(hidden, residual, step)
