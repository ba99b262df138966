"""A whole decode step as one C++ call (cpu_kernels.cpp): no graph to compile, no Python between the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_tuned_model import cpu_kernels
from npu_tuned_model.kv_cache import FixedKVCache, KVCache
from npu_tuned_model.linear import PackedLinear
from npu_tuned_model.linear_int8 import PackedInt8Linear

NEEDED_OPTIONS = ("fixed_kv_cache", "flash_attention", "fused_qkv", "fused_gate_up", "native_kernels")


class CpuDecode:
    """Qwen2ForCausalLM.decode for the models that why_no_cpu_decode() has no objection to.

    Whatever runs between two steps finds the CPU's caches full of weights and takes several times as long as
    elsewhere: so looking up the tokens, telling the positions and choosing the next token are part of the call.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.row_numbers = torch.arange(cpu_kernels.FEW_ROWS)
        self.head = getattr(model.lm_head, "blocks0", None)
        if self.head is None:
            self.head = model.lm_head.weight
        self.head_scales = getattr(model.lm_head, "scales0", torch.empty(0))
        self.scales = [
            linear.scales0
            for layer in model.model.layers
            for linear in _linears(layer)
            if isinstance(linear, PackedInt8Linear)
        ]
        self.weights = [
            weight
            for layer in model.model.layers
            for weight in (
                layer.input_layernorm.weight,
                layer.self_attn.qkv.blocks0,
                layer.self_attn.qkv.bias0,
                layer.self_attn.o_proj.blocks0,
                layer.post_attention_layernorm.weight,
                layer.mlp.gate_up_proj.blocks0,
                layer.mlp.down_proj.blocks0,
            )
        ]

    def serves(self, input_ids: Tensor, cache: KVCache) -> bool:
        """Whether this step is small enough to be bound by reading the weights."""
        return isinstance(cache, FixedKVCache) and input_ids.shape[0] <= cpu_kernels.FEW_ROWS

    def __call__(self, input_ids: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run one new token per row.

        Args:
            input_ids: (batch, 1).
            cache: what prefill filled; its lengths tell where the new tokens go.

        Returns:
            float32 logits, (batch, vocabulary), and each row's most likely token, (batch,) int64.

        Raises:
            IndexError: for a token that is not in the vocabulary.
        """
        model, network = self.model, self.model.model
        tokens, table = input_ids.contiguous(), getattr(network.embed_tokens, "weight", None)
        if table is None or table.dtype != torch.bfloat16:
            tokens, table = self.row_numbers[: input_ids.shape[0]], network.embed_tokens(input_ids.reshape(-1))
        result: tuple[Tensor, Tensor] = torch.ops.npu_tuned_model.decode_step.default(
            tokens,
            table,
            cache.lengths,
            self.weights,
            self.scales,
            cache.keys,
            cache.values,
            network.rotary.cos,
            network.rotary.sin,
            network.norm.weight,
            self.head,
            self.head_scales,
            model.config.vocab_size,
            model.config.num_attention_heads,
            model.config.rms_norm_eps,
        )
        return result


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.qkv, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def why_no_cpu_decode(model: Any) -> str | None:
    """Why the model's decode can't be one C++ call; None when it can."""
    off = [name for name in NEEDED_OPTIONS if not getattr(model.options, name)]
    if off:
        return f"needs {', '.join(off)}"
    layer = model.model.layers[0]
    if not any(
        all(isinstance(linear, kind) for linear in _linears(layer)) for kind in (PackedLinear, PackedInt8Linear)
    ):
        return "needs packed weights, whole on this rank"
    if not all(linear.few_rows_kernel for linear in _linears(layer)):
        return "needs packed weights, whole on this rank"
    head_dim = layer.self_attn.head_dim
    if head_dim % 32 or head_dim > 256:
        return f"needs a head size that is a multiple of 32 up to 256, not {head_dim}"
    if layer.mlp.down_proj.in_features % 64:
        return f"needs an intermediate size that is a multiple of 64, not {layer.mlp.down_proj.in_features}"
    return None
