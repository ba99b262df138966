"""The op contract: one function per fused NPU operator the network needs.

Every function has the arguments, shapes, layouts and results of the torch_npu operator of the same name. Tensors on an
NPU go to that operator (ascend.py), all others to plain torch with the same results (portable.py); the choice is by
device type, which torch.compile folds to a constant. composed.py holds the sequences of small ops that the fused ones
replace.

Wrong arguments raise ValueError before anything runs. Where the vendor's defaults are traps they are gone: attention
wants its scale and head count, npu_quant_matmul its output_dtype, and next_tokens never cuts a mask unasked.

Legend: B batch, S sequence, N query heads, KVN key/value heads, D head dimension, H = N*D, T tokens of all sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .attention import (
    compressed_causal_mask,
    npu_fused_infer_attention_score,
    npu_incre_flash_attention,
    npu_prompt_flash_attention,
)
from .dispatch import backend

__all__ = [
    "compressed_causal_mask",
    "npu_add_rms_norm",
    "npu_apply_rotary_pos_emb",
    "npu_dynamic_quant",
    "npu_fused_infer_attention_score",
    "npu_incre_flash_attention",
    "npu_mm_all_reduce_base",
    "npu_prompt_flash_attention",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "npu_trans_quant_param",
    "npu_weight_quant_batchmatmul",
    "scatter_update_",
]


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMS normalisation over the dimensions of ``gamma``, in float32 with one rounding at the end.

    Args:
        input: floating-point, any shape.
        gamma: the last dimensions of ``input``; dtype of ``input`` or float32.
        epsilon: added to the mean square.

    Returns:
        ``(y, rstd)``: y like ``input``; rstd float32, shape of ``input`` with 1 in the normalised dimensions.

    Raises:
        ValueError: shape or dtype of gamma.

    Source: torch_npu.npu_rms_norm (aclnnRmsNorm).
    """
    checks.rms_norm(input, gamma)
    return backend(input).npu_rms_norm(input, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add and RMS normalisation of the sum. Mind the order of the results: the new residual is the last.

    The sum is rounded to the dtype before its variance is taken, and the normalised values are rounded before gamma:
    the maths of the A2 kernel and of Hugging Face's Qwen2RMSNorm.

    Args:
        x1, x2: same shape and dtype, untouched.
        gamma: the last dimensions of x1, dtype of x1.
        epsilon: added to the mean square.

    Returns:
        ``(y, rstd, x)``: y and x = x1 + x2 like x1; rstd float32 as in npu_rms_norm.

    Raises:
        ValueError: shapes or dtypes that differ.

    Source: torch_npu.npu_add_rms_norm (aclnnAddRmsNorm).
    """
    checks.add_rms_norm(x1, x2, gamma)
    return backend(x1).npu_add_rms_norm(x1, x2, gamma, epsilon)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of query and key together.

    Use the returned tensors only: the NPU's eager kernel overwrites query and key, so pass tensors you own and do
    not read them again.

    Args:
        query: (B, S, N, D). On an NPU D must be 64 or 128, elsewhere any even number.
        key: (B, S, KVN, D).
        cos, sin: (B, S, 1, D), both halves filled; all four tensors have one dtype.
        layout: "BSND" only.
        rotary_mode: "half" only.

    Returns:
        The rotated query and key, computed in float32 and rounded once.

    Raises:
        ValueError: layout, mode, shapes, dtypes or head dimension.

    Source: torch_npu.npu_apply_rotary_pos_emb; RoPE, arXiv:2104.09864.
    """
    checks.apply_rotary_pos_emb(query, key, cos, sin, layout, rotary_mode)
    return backend(query).npu_apply_rotary_pos_emb(query, key, cos, sin, layout, rotary_mode)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding of one tensor: ``input * r1 + rotate_half(input) * r2``.

    Args:
        input: 4-D with D, even, as last dimension: BNSD, BSND or SBND.
        r1, r2: cos and sin, 4-D, full in D, each other dimension 1 or that of ``input``; cast to its dtype.
        rotary_mode: "half" only (graph mode on A2 computes "interleave" as "half" without a word).

    Returns:
        A new tensor like ``input``, computed in float32 and rounded once.

    Raises:
        ValueError: mode or shapes.

    Source: torch_npu.npu_rotary_mul.
    """
    checks.rotary_mul(input, r1, r2, rotary_mode)
    return backend(input).npu_rotary_mul(input, r1, r2, rotary_mode)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Write a run of slots into each row of ``input``, in place: the KV cache update. Not torch's scatter.

    With 1-D indices: ``input[b, .., indices[b] + k, ..] = updates[b, .., k, ..]`` for all k, the slots on ``axis``.
    With 2-D indices (rows, 2) each entry is a pair of row of ``input`` and first slot.

    Args:
        input: rank 2 to 8; rows on dimension 0.
        indices: (rows,) or (rows, 2), int32 or int64, one entry per row of ``updates``.
        updates: like ``input`` but for dimension 0 (at most as many rows) and ``axis`` (L slots).
        axis: any dimension but 0; may be negative.

    Returns:
        ``input`` itself.

    Raises:
        ValueError: rank, axis, shapes, dtypes, or L over the capacity. The positions live on the device and are not
            read: they must be 0 or more and ``indices[b] + L`` within the capacity. Past the end portable code raises
            and an NPU overwrites other memory, so check positions where they are still host integers.

    Source: torch_npu.scatter_update_ (aclnnInplaceScatterUpdate).
    """
    checks.scatter_update_(input, indices, updates, axis)
    backend(input).scatter_update_(input, indices, updates, axis)
    return input


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(gate) * up`` of an input that is cat(gate, up) along ``dim``: the first half is the gate.

    Args:
        input: floating-point, even along ``dim``.
        dim: the dimension to split.

    Returns:
        Half of ``input`` along ``dim``, same dtype; float32 inside, one rounding.

    Raises:
        ValueError: an odd dimension (the vendor's shape check lets it pass).

    Source: torch_npu.npu_swiglu; SwiGLU, arXiv:2002.05202.
    """
    checks.swiglu(input, dim)
    return backend(input).npu_swiglu(input, dim)


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    dst_type: torch.dtype | None = None,
    quant_mode: str = "pertoken",
) -> tuple[Tensor, Tensor]:
    """Quantise activations with a scale measured on the spot: ``scale = max|x| / 127``, ``y = round(x / scale)``.

    Args:
        input: floating-point, at least 2-D.
        smooth_scales: (K,), multiplied onto ``input`` first.
        dst_type: None or torch.int8; torch.quint4x2 for int4 (largest value 7), K a multiple of 8.
        quant_mode: "pertoken"; "perchannel" and "pertensor" need torch_npu newer than 2.1.

    Returns:
        ``(y, scale)``: y int8 like ``input``, or int32 with eight int4 packed along K, first in the lowest bits; scale
        float32, the factor that turns y back: ``input`` without the last dimension (perchannel: without the one
        before it; pertensor: (1,)). Rounds half to even; a slice of zeros gives zeros and scale 0.

    Raises:
        ValueError: shapes, dtypes or an unknown mode.

    Source: torch_npu.npu_dynamic_quant.
    """
    checks.dynamic_quant(input, smooth_scales, dst_type, quant_mode)
    return backend(input).npu_dynamic_quant(
        input, smooth_scales=smooth_scales, dst_type=dst_type, quant_mode=quant_mode
    )


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
    """int8 matmul with rescaling: ``(x1 @ x2 + bias) * scale * pertoken_scale``, a float bias added at the end.

    Args:
        x1: (.., M, K) int8.
        x2: (K, N) int8, or with batch dimensions that broadcast.
        scale: (1,) or (N,): float32, bfloat16 (bfloat16 output only), or int64 from npu_trans_quant_param.
        output_dtype: torch.float16, torch.bfloat16 or torch.int8. Required: the vendor's default is int8.
        offset: (1,) or (N,), added before rounding to int8; int8 output only.
        pertoken_scale: (M,) float32, for float output.
        bias: (N,) int32, added to the integer sum; or bfloat16 / float32 for bfloat16 output, float16 / float32 for
            float16 output with pertoken_scale.

    Returns:
        (.., M, N) of ``output_dtype``.

    Raises:
        ValueError: shapes, dtypes, and combinations that the A2 kernels refuse.

    Source: torch_npu.npu_quant_matmul.
    """
    checks.quant_matmul(x1, x2, scale, offset, pertoken_scale, bias, output_dtype)
    return backend(x1).npu_quant_matmul(
        x1, x2, scale, offset=offset, pertoken_scale=pertoken_scale, bias=bias, output_dtype=output_dtype
    )


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
    """Matmul with a quantised weight: ``x @ ((weight + offset) * scale) + bias``; the offset is added, not taken off.

    Args:
        x: (M, K), 2-D only.
        weight: (K, N) int8, or (K, N/8) int32 with eight int4 along N, first in the lowest bits.
        antiquant_scale, antiquant_offset: dtype of x: (1,), (1, 1), (N,), (1, N), or (groups, N) with a group size.
        quant_scale, quant_offset: make the result int8: ``round(y * quant_scale + quant_offset)``.
        bias: (N,) or (1, N); float32 for a bfloat16 x, otherwise dtype of x.
        antiquant_group_size: rows of ``weight`` per scale, a multiple of 32 below K; 0 for one scale per column.

    Returns:
        (M, N), dtype of x or int8.

    Raises:
        ValueError: a 3-D x (the vendor's op gives it a wrong shape), and shapes or dtypes outside the above.

    Source: torch_npu.npu_weight_quant_batchmatmul.
    """
    arguments = (weight, antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias, antiquant_group_size)
    checks.weight_quant_batchmatmul(x, *arguments)
    return backend(x).npu_weight_quant_batchmatmul(x, *arguments)


def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int = 0) -> Tensor:
    """Pack float32 scales, and offsets, into the int64 that npu_quant_matmul takes as ``scale``.

    The scale keeps its top 19 bits (bits 0 to 31, relative error up to 2**-10), the offset is a 9-bit integer (bits 37
    to 45), bit 46 is set.

    Args:
        scale: (t,) or (1, n) float32.
        offset: float32 of the same shape, or (1,).
        round_mode: 0, truncate, only.

    Returns:
        int64 like ``scale``.

    Raises:
        ValueError: shapes, dtypes or round_mode.

    Source: torch_npu.npu_trans_quant_param.
    """
    checks.trans_quant_param(scale, offset, round_mode)
    return backend(scale).npu_trans_quant_param(scale, offset)


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
    """Matmul and all-reduce of a row-parallel linear layer: ``sum over ranks of (x1 @ x2 + bias + x3)``.

    bias and x3 are inside the sum: pass them on one rank only.

    Args:
        x1: (M, K) or (B, S, K), floating-point.
        x2: (K, N), dtype of x1; a transposed view is fine.
        hcom: name of the HCCL group. Portable code reduces over the default process group, if there is one.
        reduce_op: "sum" only.
        bias: (N,).
        x3: shape of the result, such as the residual.
        comm_turn: 0; NPU only.

    Returns:
        (.., N), dtype of x1.

    Raises:
        ValueError: shapes, dtypes or reduce_op.

    Source: torch_npu.npu_mm_all_reduce_base (MC2).
    """
    checks.mm_all_reduce_base(x1, x2, reduce_op, bias, x3)
    return backend(x1).npu_mm_all_reduce_base(x1, x2, hcom, reduce_op=reduce_op, bias=bias, x3=x3, comm_turn=comm_turn)
