"""What every layer needs for one step, made once per step and handed down as one object.

Legend: B batch, S prompt length, N heads, KVN kv heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_tuned_model.kv_cache import FixedKVCache, GrowingKVCache
from npu_tuned_model.tuning import OpTable


@dataclass
class PrefillStep:
    """Prefill: the prompts, without padding in front, attend to themselves.

    Attributes:
        cos, sin: (B, S, 1, D), dtype of the model.
    """

    op_table: OpTable
    cache: FixedKVCache | GrowingKVCache
    cos: Tensor
    sin: Tensor

    @property
    def batch(self) -> int:
        return self.cos.shape[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of `layer`; query (B, S, N, D), key and value (B, S, KVN, D) to (B, S, N, D)."""
        self.cache.write_prompt(layer, key, value)
        return self.op_table.prompt_flash_attention(
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
    """Decode: one new token per row attends to the row's filled slots of the cache.

    Attributes:
        cos, sin: (B, 1, 1, D), dtype of the model.
        positions: (B,) int64, the slot that the new token goes into.
        kv_lengths: (B,) int64, filled slots with the new token.
        window: a tensor whose size is the number of slots to read (fixed cache), or None for all.
    """

    op_table: OpTable
    cache: FixedKVCache
    cos: Tensor
    sin: Tensor
    positions: Tensor
    kv_lengths: Tensor
    window: Tensor | None

    @property
    def batch(self) -> int:
        return self.cos.shape[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value of `layer`; query (B, 1, N, D), key and value (B, 1, KVN, D) to (B, 1, N, D)."""
        keys, values = self.cache.append(layer, key, value, self.positions, self.window)
        return self.op_table.incre_flash_attention(
            query,
            keys,
            values,
            actual_seq_lengths=self.kv_lengths,
            num_heads=query.shape[2],
            scale_value=1.0 / math.sqrt(query.shape[3]),
            input_layout="BSND",
            num_key_value_heads=key.shape[2],
        )


@dataclass
class GrowingDecodeStep:
    """Decode on the growing cache: a mask hides the columns that are no tokens of the row.

    Attributes:
        cos, sin: (B, 1, 1, D), dtype of the model.
        masked: (B, columns) bool, True where masked out.
    """

    op_table: OpTable
    cache: GrowingKVCache
    cos: Tensor
    sin: Tensor
    masked: Tensor

    @property
    def batch(self) -> int:
        return self.cos.shape[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As DecodeStep.attend."""
        keys, values = self.cache.append(layer, key, value)
        return self.op_table.incre_flash_attention(
            query,
            keys,
            values,
            atten_mask=self.masked[:, None, None, :],
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
        """(Re)compute the table, (positions, head_dim) each, on `device` in `dtype`."""
        with torch.device("cpu"):
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
            angles = torch.outer(torch.arange(self.positions, dtype=torch.int64).float(), self.theta**-exponents)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos = angles.cos().to(device=device, dtype=dtype)
        self.sin = angles.sin().to(device=device, dtype=dtype)

    def prompt(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows 0..length-1 for every sequence, (batch, length, 1, head_dim) each."""
        shape = (batch, length, 1, self.head_dim)
        return self.cos[None, :length, None].expand(shape), self.sin[None, :length, None].expand(shape)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each position, (batch,) to (batch, 1, 1, head_dim) each."""
        return self.cos[positions][:, None, None], self.sin[positions][:, None, None]


def prefill_step(
    op_table: OpTable, rotary: RotaryTable, cache: FixedKVCache | GrowingKVCache, length: int
) -> PrefillStep:
    """The step for prompts padded (behind) to `length`."""
    cos, sin = rotary.prompt(cache.batch, length)
    return PrefillStep(op_table, cache, cos, sin)


def decode_step(
    op_table: OpTable,
    rotary: RotaryTable,
    cache: FixedKVCache | GrowingKVCache,
    positions: Tensor,
    window: Tensor | None,
) -> DecodeStep | GrowingDecodeStep:
    """The step for one new token per row; `window` is what cache.decode_window() gave."""
    cos, sin = rotary.at(positions)
    if isinstance(cache, GrowingKVCache):
        assert window is not None
        return GrowingDecodeStep(op_table, cache, cos, sin, window)
    return DecodeStep(op_table, cache, cos, sin, positions, positions + 1, window)


def run_layer(layer: torch.nn.Module, hidden: Tensor, residual: Tensor | None, step: Any) -> tuple[Tensor, Tensor]:
    """Call one layer. A function of its own, so that a compiler can be told that it is the same for every layer."""
    return layer(hidden, residual, step)
