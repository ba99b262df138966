"""The sequences of small ops that the fused ones replace, the way an unfused Hugging Face style model runs them.

Same names, arguments and results as the ops of this package, and the same refusals; nothing is shared with portable.py
but the checks. Used where an optimisation is switched off, and in tests as a second opinion. Differences in rounding
are those of the unfused model: the intermediate results are rounded to the dtype of the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .attention_calls import fused_call, incremental_call, prompt_call
from .composed_attention import attend


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """As ops.npu_rms_norm, but rounded before gamma: pow, mean, rsqrt, multiply, cast, multiply."""
    checks.rms_norm(input, gamma)
    hidden = input.to(torch.float32)
    variance = hidden.pow(2).flatten(-gamma.dim()).mean(-1).reshape(*input.shape[: -gamma.dim()], *[1] * gamma.dim())
    rstd = (variance + epsilon).sqrt().reciprocal()
    return (gamma * (hidden * rstd).to(input.dtype)).to(input.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.npu_add_rms_norm: the residual add, then the norm."""
    checks.add_rms_norm(x1, x2, gamma)
    residual = x1 + x2
    normed, rstd = npu_rms_norm(residual, gamma, epsilon)
    return normed, rstd, residual


def _rotate_half(values: Tensor) -> Tensor:
    half = values.shape[-1] // 2
    return torch.cat((-values[..., half:], values[..., :half]), dim=-1)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """As ops.npu_apply_rotary_pos_emb: rotate_half, two multiplications and an addition, each rounded."""
    checks.apply_rotary_pos_emb(query, key, cos, sin, layout, rotary_mode)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """As ops.npu_rotary_mul, each step rounded."""
    checks.rotary_mul(input, r1, r2, rotary_mode)
    return input * r1.to(input.dtype) + _rotate_half(input) * r2.to(input.dtype)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """As ops.scatter_update_, by torch's own scatter with one index per element."""
    checks.scatter_update_(input, indices, updates, axis)
    axis %= input.dim()
    slot_view = [1] * input.dim()
    slot_view[axis] = -1
    offsets = indices if indices.dim() == 1 else indices[:, 1]
    slots = torch.arange(updates.shape[axis], device=input.device).view(slot_view)
    positions = offsets.view(-1, *[1] * (input.dim() - 1)) + slots
    if indices.dim() == 1:
        input.narrow(0, 0, updates.shape[0]).scatter_(axis, positions.expand_as(updates), updates)
        return input
    rows = input.index_select(0, indices[:, 0]).scatter(axis, positions.expand_as(updates), updates)
    return input.index_copy_(0, indices[:, 0].long(), rows)


def npu_prompt_flash_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """As ops.npu_prompt_flash_attention, whose keyword arguments it takes: repeat KV, matmul, mask, softmax, matmul."""
    return attend(query, key, value, prompt_call(query, key, value, **arguments))[0]


def npu_incre_flash_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """As ops.npu_incre_flash_attention, whose keyword arguments it takes."""
    return attend(query, key, value, incremental_call(query, key, value, **arguments))[0]


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """As ops.npu_fused_infer_attention_score, whose keyword arguments it takes; packed layouts need host lengths."""
    return attend(query, key, value, fused_call(query, key, value, **arguments))


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """As ops.npu_swiglu, with silu(gate) rounded before the multiplication."""
    checks.swiglu(input, dim)
    half = input.shape[dim] // 2
    gate, up = input.narrow(dim, 0, half), input.narrow(dim, half, half)
    return torch.nn.functional.silu(gate) * up


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x3: Tensor | None = None,
    comm_turn: int = 0,
) -> Tensor:
    """As ops.npu_mm_all_reduce_base: a linear layer, the residual, then an all-reduce of the default group."""
    checks.mm_all_reduce_base(x1, x2, reduce_op, bias, x3)
    partial = torch.nn.functional.linear(x1, x2.t(), bias)
    partial = partial if x3 is None else partial + x3
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(partial)
    return partial


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    dst_type: torch.dtype | None = None,
    quant_mode: str = "pertoken",
) -> tuple[Tensor, Tensor]:
    """As ops.npu_dynamic_quant: largest value, divide, round, cast."""
    checks.dynamic_quant(input, smooth_scales, dst_type, quant_mode)
    values = input.to(torch.float32)
    if smooth_scales is not None:
        values = values * smooth_scales
    reduced = {"pertoken": (-1,), "perchannel": (-2,), "pertensor": tuple(range(input.dim()))}[quant_mode]
    limit = 7 if dst_type == torch.quint4x2 else 127
    largest = torch.maximum(values.amax(reduced, keepdim=True), -values.amin(reduced, keepdim=True))
    step = largest / limit
    rounded = (values / step.masked_fill(step == 0, 1.0)).round().to(torch.int32)
    scale = step.reshape(1) if quant_mode == "pertensor" else step.squeeze(reduced[0])
    if dst_type != torch.quint4x2:
        return rounded.to(torch.int8), scale
    nibbles = rounded.bitwise_and(15)
    packed = torch.zeros_like(nibbles[..., ::8])
    for position in range(8):
        packed |= nibbles[..., position::8] << (4 * position)
    return packed, scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    output_dtype: torch.dtype,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """As ops.npu_quant_matmul, with both sides dequantised and an ordinary matmul; scales of float dtype only."""
    checks.quant_matmul(x1, x2, scale, offset, pertoken_scale, bias, output_dtype)
    if scale.dtype == torch.int64:
        raise ValueError("npu_quant_matmul: composed code takes float scales, not those of npu_trans_quant_param")
    activations = x1.double() if pertoken_scale is None else x1.double() * pertoken_scale.double()[:, None]
    result = activations @ (x2.double() * scale.double())
    if bias is not None and bias.dtype == torch.int32:
        step = scale.double() if pertoken_scale is None else scale.double() * pertoken_scale.double()[:, None]
        result = result + bias * step
    elif bias is not None:
        result = result + bias.double()
    if output_dtype != torch.int8:
        return result.to(output_dtype)
    result = result if offset is None else result + offset.double()
    return result.round().clip(-128, 127).to(torch.int8)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """As ops.npu_weight_quant_batchmatmul: one float32 matmul per group of rows, scaled and summed."""
    checks.weight_quant_batchmatmul(
        x, weight, antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias, antiquant_group_size
    )
    if weight.dtype == torch.int32:
        # Shifting a nibble to the top and back extends its sign.
        weight = torch.stack([(weight << (28 - 4 * position)) >> 28 for position in range(8)], dim=-1).flatten(1)
    depth, columns = weight.shape
    size = antiquant_group_size or depth
    scales = antiquant_scale.float().expand(columns) if antiquant_scale.dim() == 1 else antiquant_scale.float()
    scales = scales.reshape(-1, scales.shape[-1])
    result = torch.zeros(x.shape[0], columns, device=x.device)
    for group, start in enumerate(range(0, depth, size)):
        rows = x[:, start : start + size].float()
        part = rows @ weight[start : start + size].float()
        if antiquant_offset is not None:
            offsets = antiquant_offset.float().reshape(-1, antiquant_offset.shape[-1])
            part = part + rows.sum(1, keepdim=True) * offsets[group]
        result = result + part * scales[group]
    result = result.to(x.dtype)
    if bias is not None:
        result = (result + bias).to(x.dtype)
    if quant_scale is None:
        return result
    scaled = result * quant_scale.float()
    scaled = scaled if quant_offset is None else scaled + quant_offset
    return scaled.round().clip(-128, 127).to(torch.int8)
