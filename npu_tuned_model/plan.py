"""Will it fit, and how fast can it be? ``python -m npu_tuned_model.plan --help``; nothing is loaded.

Memory of weights and KV cache is exact. The peak of activations is what an NPU's fused operators need in the widest
place, the feed-forward of prefill. Times are lower bounds (roofline model, doi 10.1145/1498765.1498785): operations
over the peak, bytes over the bandwidth, whichever is longer, and the sums over the ranks over the links, without any
overlap of the two and without latencies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from transformers import Qwen2Config

from npu_tuned_model.checkpoint_layout import Shard, check_tp_size, converted_tp_size, vocabulary_cut
from npu_tuned_model.config import config_from, first_line, read_json
from npu_tuned_model.device import resolve_dtype
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.kv_cache import CAPACITY_STEP, round_up
from npu_tuned_model.published import PUBLISHED, SHAPES
from npu_tuned_model.work import work_of

# Driver, runtime and collectives take this much of a card before anything is loaded.
RESERVE_BYTES = 4 * 10**9
_MASK_SIDE = 2048


@dataclass(frozen=True)
class Device:
    """One card. Bytes per second; `link_to_each` to every other card of the machine, `link_total` to all of them."""

    memory_bytes: int
    bandwidth: float
    flops: float
    link_to_each: float
    link_total: float

    def sum_seconds(self, nbytes: float, ranks: int) -> float:
        """A sum over the ranks: each sends 2 (N - 1) / N of the bytes (reduce-scatter, then all-gather)."""
        if ranks == 1:
            return 0.0
        return 2 * (ranks - 1) / ranks * nbytes / min(self.link_to_each * (ranks - 1), self.link_total)


# Vendor figures, bf16 without sparsity. Of the A2 cards with 64 GB there are variants with 295 and with 354 TFLOP/s:
# the bound takes the faster. Its links: seven of 28 GB/s each way.
DEVICES = {
    "atlas-800i-a2-64g": Device(64 * 2**30, 1.6e12, 354e12, 28e9, 196e9),
    "atlas-800i-a2-32g": Device(32 * 2**30, 0.8e12, 246e12, 28e9, 196e9),
    "h200": Device(141 * 10**9, 4.8e12, 989e12, 450e9, 450e9),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one card."""

    weights: int
    kv_cache: int
    tables: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.tables + self.activations


@dataclass(frozen=True)
class Bound:
    """Lower bounds of one step in milliseconds: work on the card, and sums over the ranks."""

    work_ms: float
    sums_ms: float

    @property
    def total_ms(self) -> float:
        return self.work_ms + self.sums_ms


@dataclass(frozen=True)
class Plan:
    """A model on a number of cards, with a dtype; the questions that can be asked of it take a workload.

    Raises:
        UserError: tp_size does not divide the model.
    """

    config: Qwen2Config
    tp_size: int
    dtype: torch.dtype
    device: Device

    def __post_init__(self) -> None:
        check_tp_size(self.config, self.tp_size)

    @property
    def shard(self) -> Shard:
        """The rank that holds most: the shares of the vocabulary may differ by a row, the last is never smaller."""
        return Shard(self.tp_size - 1, self.tp_size)

    def memory(self, batch: int, prompt: int, new_tokens: int) -> Memory:
        """Bytes on one card for `batch` rows of `prompt` tokens and `new_tokens` more."""
        config, size = self.config, self.dtype.itemsize
        work = work_of(config, dtype=self.dtype, batch=batch, length=prompt, shard=self.shard)
        # as new_cache() does for a compiled model
        slots = round_up(round_up(prompt + new_tokens, GraphOptions().prefill_bucket) + 1, CAPACITY_STEP)
        head_dim = config.hidden_size // config.num_attention_heads
        tables = 2 * config.max_position_embeddings * head_dim * size + _MASK_SIDE**2
        # Residual, normed input, gate and up together, and their product; then the logits, also in float32.
        feed_forward = batch * prompt * (2 * config.hidden_size + 3 * config.intermediate_size // self.tp_size) * size
        logits = batch * (vocabulary_cut(config, self.shard).length * size + config.vocab_size * (size + 4))
        return Memory(
            weights=work.weight_bytes,
            kv_cache=batch * slots * work.kv_bytes_per_token,
            tables=tables,
            activations=max(feed_forward, logits),
        )

    def fits(self, batch: int, prompt: int, new_tokens: int) -> bool:
        return self.memory(batch, prompt, new_tokens).total + RESERVE_BYTES <= self.device.memory_bytes

    def largest_batch(self, prompt: int, new_tokens: int) -> int:
        """The largest batch that fits; 0 when none does."""
        return _largest(lambda batch: self.fits(batch, prompt, new_tokens))

    def largest_prompt(self, batch: int, new_tokens: int) -> int:
        """The longest prompt that fits and that the model takes; 0 when none does."""
        limit = self.config.max_position_embeddings - new_tokens
        return _largest(lambda prompt: prompt <= limit and self.fits(batch, prompt, new_tokens))

    def prefill(self, batch: int, prompt: int) -> Bound:
        """The first step."""
        work = work_of(self.config, dtype=self.dtype, batch=batch, length=prompt, shard=self.shard)
        seconds = max(work.prefill_flops / self.device.flops, work.step_weight_bytes / self.device.bandwidth)
        return self._bound(seconds, work.sums_per_step, batch * prompt, batch)

    def decode(self, batch: int, prompt: int, new_tokens: int) -> Bound:
        """The mean of the later steps."""
        work = work_of(self.config, dtype=self.dtype, batch=batch, length=prompt, shard=self.shard)
        cached = batch * (prompt + (new_tokens - 1) / 2)
        seconds = max(work.decode_flops / self.device.flops, work.decode_bytes(cached) / self.device.bandwidth)
        return self._bound(seconds, work.sums_per_step, batch, batch)

    def _bound(self, seconds: float, sums: int, tokens: int, rows: int) -> Bound:
        size = self.dtype.itemsize
        hidden = self.device.sum_seconds(tokens * self.config.hidden_size * size, self.tp_size)
        logits = self.device.sum_seconds(rows * self.config.vocab_size * size, self.tp_size)
        return Bound(seconds * 1000, (sums * hidden + logits) * 1000)


def _largest(works: Callable[[int], bool]) -> int:
    """The largest whole number that works, when all smaller ones do."""
    if not works(1):
        return 0
    low, high = 1, 2
    while works(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def load_config(name: str) -> Qwen2Config:
    """The configuration of a published shape (see SHAPES), a config.json, its folder, or a Hub id.

    Raises:
        UserError: when there is none, or the tuned model can't run it.
    """
    if name.lower() in SHAPES:
        return config_from(Path(name), dict(SHAPES[name.lower()]))
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        try:
            path = Path(huggingface_hub.hf_hub_download(name, "config.json"))
        # As in resolve_checkpoint: what it raises depends on the client's version.
        except Exception as error:
            raise UserError(
                f"--config={name} is no file or folder, none of {', '.join(SHAPES)}, and could not be fetched from the "
                f"Hub ({first_line(error)})"
            ) from error
    return config_from(path, read_json(path))


def report(plan: Plan, batch: int, prompt: int, new_tokens: int) -> list[str]:
    """The answers, line by line."""
    memory = plan.memory(batch, prompt, new_tokens)
    most = plan.device.memory_bytes - RESERVE_BYTES
    fits = memory.total <= most
    rows = [
        ("weights", memory.weights),
        ("KV cache", memory.kv_cache),
        ("rotary table, mask", memory.tables),
        ("activations, prefill", memory.activations),
        ("together", memory.total),
    ]
    lines = [f"Memory per card, of {most / 1e9:.1f} GB ({RESERVE_BYTES / 1e9:.0f} GB left to driver and collectives):"]
    lines += [f"  {name:<22}{value / 1e9:8.2f} GB" for name, value in rows]
    lines.append(f"  {'it fits' if fits else 'IT DOES NOT FIT'}")
    lines.append(f"  largest batch at {prompt} + {new_tokens} tokens: {plan.largest_batch(prompt, new_tokens)}")
    lines.append(f"  longest prompt at batch {batch}: {plan.largest_prompt(batch, new_tokens)}")
    published = PUBLISHED.get((plan.config.hidden_size, plan.config.num_hidden_layers, plan.tp_size), {})
    lines.append(
        "Times, ms: lower bound (work + sums over the ranks)" + (", published, share reached" * bool(published))
    )
    batches = sorted({batch, *(published if prompt == 1024 and new_tokens == 1024 else ())})
    for rows_in_batch in batches:
        bounds = (plan.prefill(rows_in_batch, prompt), plan.decode(rows_in_batch, prompt, new_tokens))
        measured = published.get(rows_in_batch) if prompt == 1024 and new_tokens == 1024 else None
        for index, (step, bound) in enumerate(zip(("prefill", "decode"), bounds)):
            line = (
                f"  batch {rows_in_batch:>3} {step:<8}{bound.total_ms:9.2f} ({bound.work_ms:.2f} + {bound.sums_ms:.2f})"
            )
            if measured is not None:
                line += f"{measured[index]:>8} {bound.total_ms / measured[index]:>5.0%}"
            lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 when the workload fits, 1 when not, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m npu_tuned_model.plan", description="Will it fit, how fast can it be?"
    )
    parser.add_argument("--config", required=True, help=f"config.json, its folder, a Hub id, or {', '.join(SHAPES)}")
    parser.add_argument("--tp_size", type=int, default=1, help="number of cards")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--input_max_len", type=int, default=1024, help="tokens of the padded prompt")
    parser.add_argument("--max_new_tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="atlas-800i-a2-64g", choices=sorted(DEVICES))
    given = parser.parse_args(arguments)
    try:
        for name in ("batch_size", "input_max_len", "max_new_tokens"):
            if getattr(given, name) < 1:
                raise UserError(f"--{name} is {getattr(given, name)}, it must be at least 1")
        config = load_config(given.config)
        made_for = converted_tp_size(config)
        if made_for not in (None, given.tp_size):
            raise UserError(f"{given.config} was converted for tp_size {made_for}: pass --tp_size={made_for}")
        tokens = given.input_max_len + given.max_new_tokens
        if tokens > config.max_position_embeddings:
            raise UserError(f"{tokens} tokens are more than the model's context of {config.max_position_embeddings}")
        plan = Plan(config, given.tp_size, resolve_dtype(given.dtype), DEVICES[given.device])
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    workload = (given.batch_size, given.input_max_len, given.max_new_tokens)
    print(f"{given.config} on {given.tp_size} x {given.device}, {given.dtype}, batch {workload[0]}")
    print("\n".join(report(plan, *workload)))
    return 0 if plan.fits(*workload) else 1


if __name__ == "__main__":
    sys.exit(main())
