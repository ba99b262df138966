"""The KV cache: where the next tokens go, and what decode reads.

Prompts are stored without their padding: row b holds its tokens in slots 0..length_b-1 and its next token goes into
slot length_b, whatever padding the caller's batch had. So decode needs lengths only and never a mask.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence, Union

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from npu_tuned_model import ops
from npu_tuned_model.chip import AttentionPlan
from npu_tuned_model.errors import UserError

# Decode reads the cache in windows of a multiple of this many slots: a matmul library builds one kernel per size, and
# rounding makes it build one per 64 tokens instead of one per token.
WINDOW_STEP = 64
# Capacities are rounded up to a multiple of this, so that requests of about the same length share one decode graph.
CAPACITY_STEP = 256
# Expanded to a length, it says that length and holds no memory.
_NOTHING = torch.empty(1)

# What decode_window() tells a decode step about the part of the cache to read.
Window = Union[Tensor, "list[Tensor]", None]


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class KVCache(Cache):
    """Host-side bookkeeping shared by the caches below.

    Attributes:
        capacity: tokens per row that may be stored.
        lengths: tokens stored so far in each row, known on the host (never read back from the device).
        most_likely: a greedy.MostLikely where the last step has found each row's most likely token; else None.
        causal_mask: (2048, 2048) bool on the device, what prefill's attention takes for "causal".
        plan: the attention operators that read the cache, and how they learn its lengths.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, plan: AttentionPlan) -> None:
        self.batch = batch
        self.capacity = capacity
        self.plan = plan
        self.lengths: list[int] = [0] * batch
        self.most_likely: Any = None
        self._positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self._filled = self._positions + 1
        self._behind = 0  # tokens stored since the two were computed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # made here, outside any graph, because it is the same for every prompt
        self.causal_mask = ops.compressed_causal_mask(device)

    def start(self, lengths: Sequence[int]) -> None:
        """Note the lengths of the prompts that prefill has stored."""
        self.lengths = list(lengths)
        self._positions = torch.tensor(self.lengths, dtype=torch.int64).to(self._positions.device)
        self._filled, self._behind, self.most_likely = self._positions + 1, 0, None

    def advance(self) -> None:
        """Note that decode has stored one more token in every row."""
        self.lengths = [length + 1 for length in self.lengths]
        self._behind += 1
        self.most_likely = None

    @property
    def positions(self) -> Tensor:
        """(batch,) int64 on the device, the slot and rotary position of each row's next token."""
        return self._on_the_device()[0]

    @property
    def filled(self) -> Tensor:
        """positions + 1, the slots that hold tokens once that token is stored."""
        return self._on_the_device()[1]

    def _on_the_device(self) -> tuple[Tensor, Tensor]:
        # computed when they are asked for: not every decode step needs them
        if self._behind:
            self._positions = self._filled if self._behind == 1 else self._positions + self._behind
            self._filled, self._behind = self._positions + 1, 0
        return self._positions, self._filled

    def check_room(self, tokens: int) -> None:
        """Raise UserError when `tokens` more per row don't fit."""
        longest = max(self.lengths)
        if longest + tokens > self.capacity:
            raise UserError(
                f"the KV cache holds {self.capacity} tokens per row and {longest} + {tokens} are asked for; "
                "make it larger: model.new_cache(batch, capacity)"
            )

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return max(self.lengths)

    def get_max_length(self) -> int | None:
        return self.capacity

    @property
    def seen_tokens(self) -> int:
        return max(self.lengths)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, cache_kwargs: object = None) -> None:
        raise UserError("the tuned model writes its own KV cache; to drive it by hand, call model.forward()")


class FixedKVCache(KVCache):
    """One (batch, slots, kv_heads, head_dim) tensor per layer for keys and one for values, updated in place.

    Allocated once per generation. Layout BSND; writes go through scatter_update_ (one start slot per row).
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        plan: AttentionPlan,
    ) -> None:
        super().__init__(batch, capacity, device, plan)
        # One slot more than any window: a window that may equal the cache would be a second shape to compile for.
        slots = round_up(capacity + 1, CAPACITY_STEP)
        shape = (batch, slots, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.prompt_start = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slot_numbers = torch.arange(slots, device=device)

    def decode_window(self) -> Window:
        """What tells the next decode step how much of the cache to read, by plan.lengths.

        "window": the slots to read, as a tensor whose size is the window's. "host": one tensor per row, whose size is
        the number of filled slots with the new token. Otherwise None. The sizes are marked dynamic: they reach a graph
        as symbols, each of its own, so one decode graph serves every window and every mix of lengths.
        """
        if self.plan.lengths == "host":
            sized = [_NOTHING.expand(length + 1) for length in self.lengths]
        elif self.plan.lengths == "window":
            size = min(round_up(max(self.lengths) + 1, WINDOW_STEP), self.slot_numbers.shape[0] - 1)
            sized = [self.slot_numbers[:size]]
        else:
            return None
        for tensor in sized:
            torch._dynamo.mark_dynamic(tensor, 0)
        return sized if self.plan.lengths == "host" else sized[0]

    def rows(self, first: int, end: int) -> FixedKVCache:
        """These rows as a cache of their own, on the same memory."""
        part = copy.copy(self)
        part.batch = end - first
        part.lengths = self.lengths[first:end]
        part._positions, part._filled, part._behind = self.positions[first:end], self.filled[first:end], 0
        part.prompt_start = self.prompt_start[first:end]
        part.keys = [key[first:end] for key in self.keys]
        part.values = [value[first:end] for value in self.values]
        return part

    def write_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store a prompt's keys and values, (batch, sequence, kv_heads, head_dim) each, from slot 0 on."""
        ops.scatter_update_(self.keys[layer], self.prompt_start, key, 1)
        ops.scatter_update_(self.values[layer], self.prompt_start, value, 1)

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Store one token per row at `positions` (batch,) and return the keys and values that decode reads."""
        keys = ops.scatter_update_(self.keys[layer], positions, key, 1)
        values = ops.scatter_update_(self.values[layer], positions, value, 1)
        if not isinstance(window, Tensor):
            return keys, values
        return keys[:, : window.shape[0]], values[:, : window.shape[0]]


class GrowingKVCache(KVCache):
    """The cache without the optimisation: every token makes a new, longer copy of keys and values.

    A new token lands in the same column for every row, behind the longest prompt, so decode needs a mask that hides
    the columns between a shorter prompt's end and the new tokens.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, plan: AttentionPlan) -> None:
        super().__init__(batch, capacity, device, plan)
        self.masked = torch.zeros(batch, 0, dtype=torch.bool, device=device)

    def write_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.keys.append(key.clone())
        self.values.append(value.clone())

    def start(self, lengths: Sequence[int]) -> None:
        super().start(lengths)
        columns = torch.arange(self.keys[0].shape[1], device=self.positions.device)
        self.masked = columns[None, :] >= self.positions[:, None]

    def decode_window(self) -> Tensor:
        """(batch, columns + 1) bool, True where a column is no token of that row; the new token's column is last."""
        self.masked = torch.cat([self.masked, self.masked.new_zeros(self.batch, 1)], dim=1)
        for tensor in (self.masked, *self.keys, *self.values):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return self.masked

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Put one token per row behind the others and return all keys and values."""
        self.keys[layer] = torch.cat([self.keys[layer], key], dim=1)
        self.values[layer] = torch.cat([self.values[layer], value], dim=1)
        return self.keys[layer], self.values[layer]
