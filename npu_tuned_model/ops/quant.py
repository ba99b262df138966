"""The portable side of the quantised linear ops: dynamic activations, int8 x int8, int8 or int4 weights.

int4 values travel eight to an int32, the first in the lowest four bits.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

_INT4_PER_WORD = 8
# A float32 sum of int8 products is exact while every partial sum stays below 2**24.
_EXACT_FLOAT32_TERMS = 2**24 // 128**2
# npu_trans_quant_param keeps the top 19 bits of a float32 scale, a 9-bit offset from bit 37 on, and a mark in bit 46.
_SCALE_BITS = 0xFFFFE000
_OFFSET_SHIFT = 37
_OFFSET_BITS = 0x1FF
_SCALE_MARK = 1 << 46
# up to here torch's own matmul with int8 weights (torch 2.1 has none) is faster than widening them: 1.7 ms against 16
# for one row of 896 inputs and 9728 features, 20 ms each for 64 rows
_FEW_ROWS = 32
# it crashes on a K of 16 or 24 (torch 2.13, bfloat16)
_KERNEL_DEPTH = 64
_INT8_KERNEL: Callable[..., Tensor] | None = getattr(torch, "_weight_int8pack_mm", None)


def to_int8(values: Tensor) -> Tensor:
    """Round half to even and saturate."""
    return torch.round(values).clamp(-128, 127).to(torch.int8)


def pack_int4(values: Tensor) -> Tensor:
    """(..., 8*n) integers from -8 to 7 -> (..., n) int32."""
    nibbles = values.to(torch.int64).unflatten(-1, (-1, _INT4_PER_WORD)) & 0xF
    shifts = torch.arange(0, 32, 4, device=values.device)
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """(..., n) int32 -> (..., 8*n) int8 from -8 to 7."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    nibbles = (words.unsqueeze(-1) >> shifts) & 0xF
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8).flatten(-2)


def npu_dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None, dst_type: torch.dtype | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    values = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    packed = dst_type == torch.quint4x2
    largest = 7.0 if packed else 127.0
    magnitude = values.abs()
    if quant_mode == "pertensor":
        scale = magnitude.amax().reshape(1) / largest
        divisor = scale
    else:
        dim = -1 if quant_mode == "pertoken" else -2
        scale = magnitude.amax(dim) / largest
        divisor = scale.unsqueeze(dim)
    quantised = torch.round(values / torch.where(divisor == 0, 1.0, divisor)).clamp(-largest - 1, largest)
    return (pack_int4(quantised) if packed else quantised.to(torch.int8)), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    # CUDA has no int32 matmul; floats wide enough for the sum are exact everywhere and use the fast kernels.
    exact = torch.float32 if x1.shape[-1] <= _EXACT_FLOAT32_TERMS else torch.float64
    total = torch.matmul(x1.to(exact), x2.to(exact))
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    factor, packed_offset = unpack_quant_param(scale) if scale.dtype == torch.int64 else (scale.float(), None)
    result = total.float() * factor
    if pertoken_scale is not None:
        result = result * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        result = result + bias.float()
    if output_dtype != torch.int8:
        return result.to(output_dtype)
    if offset is not None:
        result = result + offset.float()
    elif packed_offset is not None:
        result = result + packed_offset
    return to_int8(result)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    antiquant_group_size: int,
) -> Tensor:
    if quant_scale is None and _is_plain_int8(weight, antiquant_scale, antiquant_offset, antiquant_group_size):
        return _times_integers(x, weight, antiquant_scale, bias)
    integers = (unpack_int4(weight) if weight.dtype == torch.int32 else weight).float()
    depth = integers.shape[0]

    def per_row(parameter: Tensor) -> Tensor:
        if antiquant_group_size:
            return parameter.float().repeat_interleave(antiquant_group_size, dim=0)[:depth]
        return parameter.float()

    if antiquant_offset is not None:
        integers = integers + per_row(antiquant_offset)
    result = torch.matmul(x, (integers * per_row(antiquant_scale)).to(x.dtype))
    if bias is not None:
        result = (result.float() + bias.float()).to(x.dtype)
    if quant_scale is None:
        return result
    scaled = result.float() * quant_scale.float()
    return to_int8(scaled if quant_offset is None else scaled + quant_offset.float())


def _is_plain_int8(weight: Tensor, scale: Tensor, offset: Tensor | None, group_size: int) -> bool:
    """Whether each column has a scale and nothing else, so that the scale can be multiplied to the result."""
    return weight.dtype == torch.int8 and offset is None and not group_size and scale.numel() == weight.shape[1]


def _times_integers(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x (M, K) @ weight (K, N) int8 * scale (N,) + bias (N,)."""
    by_rows = weight.t()
    served = x.shape[0] <= _FEW_ROWS and x.shape[1] % _KERNEL_DEPTH == 0 and by_rows.is_contiguous()
    if x.device.type == "cpu" and served and _INT8_KERNEL is not None:
        product = _INT8_KERNEL(x, by_rows, scale.view(-1))
        return product if bias is None else (product.float() + bias.float()).to(x.dtype)
    return widening_matmul(x, weight, scale, bias)


def widening_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The same in a form that a compiler turns into one kernel, which widens the weight on its way to the matmul."""
    if x.dtype == torch.float16:
        # the integers' sums would exceed its largest number
        product = torch.matmul(x, (weight.float() * scale.float().view(-1)).to(x.dtype)).float()
    else:
        product = torch.matmul(x, weight.to(x.dtype)).float() * scale.float().view(-1)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def npu_trans_quant_param(scale: Tensor, offset: Tensor | None) -> Tensor:
    packed = (scale.contiguous().view(torch.int32).to(torch.int64) & _SCALE_BITS) | _SCALE_MARK
    if offset is None:
        return packed
    return packed | ((torch.round(offset).clamp(-256, 255).to(torch.int64) & _OFFSET_BITS) << _OFFSET_SHIFT)


def unpack_quant_param(packed: Tensor) -> tuple[Tensor, Tensor]:
    """int64 of npu_trans_quant_param -> (float32 scale, float32 offset)."""
    bits = packed & _SCALE_BITS
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    offset = (packed >> _OFFSET_SHIFT) & _OFFSET_BITS
    offset = torch.where(offset > 255, offset - 512, offset)
    return signed.to(torch.int32).view(torch.float32), offset.float()
