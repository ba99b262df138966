"""What this machine can do at best, measured between the rounds: memory reads and matmuls.

Virtual machines change speed by themselves, so a ceiling only says something about a time taken next to it.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Config

from npu_tuned_model.checkpoint_layout import WHOLE, Shard, pieces_of, shape_of
from npu_tuned_model.device import synchronize
from npu_tuned_model.linear import packer_for
from npu_tuned_model.work import Work

# Far beyond any cache, and small enough to stand beside the model: larger reads repeat it.
LARGEST_BUFFER = 512 * 2**20
SQUARE = 2048


class Ceilings:
    """Buffers for the two measurements, made once so that a measurement times nothing else."""

    def __init__(
        self,
        config: Qwen2Config,
        work: Work,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        shard: Shard = WHOLE,
    ) -> None:
        """rows: tokens of the prefill, batch * length; shard: whose matmul shapes are measured."""
        self.device = device
        self._bytes = work.step_weight_bytes
        elements = max(min(self._bytes, LARGEST_BUFFER) // 4, 1)
        # ones, not zeros: the system may back untouched zeros by one and the same page
        self._buffer = torch.ones(elements, dtype=torch.float32, device=device)
        self._candidates: list[tuple[str, float, Callable[[], Tensor]]] = []
        pack = packer_for(device.type, dtype)
        for name, out_features, in_features in _shapes(config, shard):
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


def _shapes(config: Qwen2Config, shard: Shard) -> list[tuple[str, int, int]]:
    """(name, out, in) of a layer's matmuls."""
    shapes = []
    for name in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        rows, columns = shape_of(pieces_of(f"model.layers.0.{name}.weight", config, shard))
        shapes.append((name.rpartition(".")[2], rows, columns))
    return shapes


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
