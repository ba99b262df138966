"""What this machine can do at best, measured between the rounds: memory reads and matmuls.

Virtual machines change speed by themselves, so a ceiling only says something about a time taken next to it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Config

from npu_tuned_model.device import synchronize
from npu_tuned_model.linear import packer_for

# Far beyond any cache, and small enough to stand beside the model: larger reads repeat it.
LARGEST_BUFFER = 512 * 2**20
SQUARE = 2048


@dataclass(frozen=True)
class Work:
    """What one prefill and one decode step have to do at least, whoever does it.

    Attributes:
        weight_bytes: all weights.
        step_weight_bytes: weights that one decode step reads (an untied embedding table is only looked up).
        kv_bytes_per_token: keys and values of one token in one row.
        prefill_flops: the matmuls of the layers, causal attention and the output layer for each row's last token.
    """

    weight_bytes: int
    step_weight_bytes: int
    kv_bytes_per_token: int
    prefill_flops: int

    def decode_bytes(self, tokens_in_cache: float) -> float:
        """Bytes a decode step reads with so many tokens in the cache over all rows."""
        return self.step_weight_bytes + tokens_in_cache * self.kv_bytes_per_token


def work_of(config: Qwen2Config, *, dtype: torch.dtype, batch: int, length: int) -> Work:
    """The work for `batch` prompts of `length` tokens (padding included: it is computed too)."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv_width = hidden // config.num_attention_heads * config.num_key_value_heads
    matmuls = hidden * (hidden + 2 * kv_width) + hidden * hidden + 3 * hidden * inner
    small = hidden + 2 * kv_width + 2 * hidden  # biases and norms
    table = config.vocab_size * hidden
    parameters = layers * (matmuls + small) + hidden + table
    if not config.tie_word_embeddings:
        parameters += table
    size = torch.empty(0, dtype=dtype).element_size()
    attention = 4 * hidden * (length * (length + 1) // 2)
    return Work(
        weight_bytes=parameters * size,
        step_weight_bytes=(parameters - (0 if config.tie_word_embeddings else table)) * size,
        kv_bytes_per_token=2 * layers * kv_width * size,
        prefill_flops=batch * (layers * (2 * length * matmuls + attention) + 2 * table),
    )


class Ceilings:
    """Buffers for the two measurements, made once so that a measurement times nothing else."""

    def __init__(self, config: Qwen2Config, work: Work, *, device: torch.device, dtype: torch.dtype, rows: int) -> None:
        """rows: tokens of the prefill, batch * length."""
        self.device = device
        self._bytes = work.step_weight_bytes
        elements = max(min(self._bytes, LARGEST_BUFFER) // 4, 1)
        # ones, not zeros: the system may back untouched zeros by one and the same page
        self._buffer = torch.ones(elements, dtype=torch.float32, device=device)
        self._candidates: list[tuple[str, float, Callable[[], Tensor]]] = []
        pack = packer_for(device.type, dtype)
        for name, out_features, in_features in _shapes(config):
            self._add(name, rows, out_features, in_features, dtype, pack)
        self._add(f"square {SQUARE}", SQUARE, SQUARE, SQUARE, dtype, pack)

    def _add(self, name: str, rows: int, out_features: int, in_features: int, dtype: torch.dtype, pack: Any) -> None:
        data = torch.randn(rows, in_features, device=self.device).to(dtype)
        linear = torch.nn.Linear(in_features, out_features, bias=False, device=self.device, dtype=dtype)
        linear.requires_grad_(False)
        flops = 2.0 * rows * out_features * in_features
        weight = linear.weight
        self._candidates.append((f"{name}, plain", flops, lambda: F.linear(data, weight)))
        if pack is not None:
            packed = pack(linear, [out_features])
            self._candidates.append((f"{name}, packed", flops, lambda: packed(data)))

    def measure(self) -> dict[str, Any]:
        """One measurement of both ceilings.

        Returns:
            weights_read_ms (time to read as many bytes as a decode step reads weights), bandwidth_gb_per_s,
            matmul_tflop_per_s (the best of the model's own matmul shapes and a large square one, packed and plain)
            and matmul_shape (which one that was).
        """
        read_s = self._time(lambda: self._buffer.sum())
        bandwidth = self._buffer.nbytes / read_s
        best, shape = 0.0, ""
        with torch.no_grad():
            for name, flops, call in self._candidates:
                rate = flops / self._time(call)
                if rate > best:
                    best, shape = rate, name
        return {
            "weights_read_ms": self._bytes / bandwidth * 1000,
            "bandwidth_gb_per_s": bandwidth / 1e9,
            "matmul_tflop_per_s": best / 1e12,
            "matmul_shape": shape,
        }

    def _time(self, call: Callable[[], Tensor], repeats: int = 3) -> float:
        """Seconds of the fastest of a few calls, the first not counted: a ceiling is what is possible."""
        call()
        fastest = math.inf
        for _ in range(repeats):
            synchronize(self.device)
            start = time.perf_counter()
            call()
            synchronize(self.device)
            fastest = min(fastest, time.perf_counter() - start)
        return fastest


def _shapes(config: Qwen2Config) -> list[tuple[str, int, int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_width = hidden // config.num_attention_heads * config.num_key_value_heads
    return [
        ("qkv", hidden + 2 * kv_width, hidden),
        ("o_proj", hidden, hidden),
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ]


def utilisation(
    figures: dict[str, Any], ceilings: dict[str, Any], work: Work, *, tokens_in_cache: float
) -> dict[str, float | None]:
    """Shares of the ceilings that one round reached, and how many reads of the weights a decode step took."""
    decode_s = None if figures["decode_ms"] is None else figures["decode_ms"] / 1000
    prefill_rate = work.prefill_flops / (figures["prefill_ms"] / 1000)
    return {
        "prefill_tflop_per_s": prefill_rate / 1e12,
        "prefill_share_of_matmul_peak": prefill_rate / 1e12 / ceilings["matmul_tflop_per_s"],
        "decode_gb_per_s": None if decode_s is None else work.decode_bytes(tokens_in_cache) / decode_s / 1e9,
        "decode_share_of_bandwidth": None
        if decode_s is None
        else work.decode_bytes(tokens_in_cache) / decode_s / 1e9 / ceilings["bandwidth_gb_per_s"],
        "decode_per_weights_read": None if decode_s is None else decode_s * 1000 / ceilings["weights_read_ms"],
    }
