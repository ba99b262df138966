"""The op contract on an Ascend NPU: one call to torch_npu per op.

Only arguments that torch_npu 2.1.0.post17 and 2.13.0 share are passed, by keyword after the tensors, and always those
whose default differs between the two or is a trap (layout, pre_tokens, next_tokens, scale, sparse_mode, ...).
Arguments were checked by the caller; limits that only the NPU has are checked here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_checks import AttentionCall, host_lengths
from .checks import ascend_rotary_head_dim, ascend_weight_quant_sides, refuse


def _torch_npu() -> Any:
    try:
        import torch_npu
    except ImportError as error:
        raise ImportError(
            "tensors on an NPU need torch_npu, which can't be imported; install the release for this torch and "
            "source CANN's set_env.sh"
        ) from error
    return torch_npu


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return _torch_npu().npu_rms_norm(input, gamma, epsilon=epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return _torch_npu().npu_add_rms_norm(x1, x2, gamma, epsilon=epsilon)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    ascend_rotary_head_dim(query.shape[-1])
    return _torch_npu().npu_apply_rotary_pos_emb(query, key, cos, sin, layout=layout, rotary_mode=rotary_mode)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    return _torch_npu().npu_rotary_mul(input, r1, r2, rotary_mode=rotary_mode)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return _torch_npu().scatter_update_(input, indices, updates, axis)


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    return _torch_npu().npu_swiglu(input, dim=dim)


def npu_prompt_flash_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    return _torch_npu().npu_prompt_flash_attention(
        query,
        key,
        value,
        atten_mask=call.atten_mask,
        pse_shift=call.pse_shift,
        actual_seq_lengths=host_lengths(call.rules.op, "actual_seq_lengths", call.query_lengths),
        quant_scale2=call.quant_scale2,
        quant_offset2=call.quant_offset2,
        num_heads=call.shape.heads,
        scale_value=call.scale,
        pre_tokens=call.pre_tokens,
        next_tokens=call.next_tokens,
        input_layout=call.input_layout,
        num_key_value_heads=call.shape.kv_heads,
        actual_seq_lengths_kv=host_lengths(call.rules.op, "actual_seq_lengths_kv", call.kv_lengths),
        sparse_mode=call.sparse_mode,
    )


def npu_incre_flash_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    return _torch_npu().npu_incre_flash_attention(
        query,
        key,
        value,
        atten_mask=call.atten_mask,
        pse_shift=call.pse_shift,
        actual_seq_lengths=host_lengths(call.rules.op, "actual_seq_lengths", call.kv_lengths),
        block_table=call.block_table,
        quant_scale2=call.quant_scale2,
        quant_offset2=call.quant_offset2,
        kv_padding_size=call.kv_padding_size,
        num_heads=call.shape.heads,
        scale_value=call.scale,
        input_layout=call.input_layout,
        num_key_value_heads=call.shape.kv_heads,
        block_size=call.block_size,
        inner_precise=call.inner_precise,
    )


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    lengths = (call.query_lengths, call.kv_lengths)
    on_device = [isinstance(given, Tensor) for given in lengths if given is not None]
    if any(on_device) and not all(on_device):
        raise refuse(call.rules.op, "give both length arguments as lists or both as tensors, not one of each")
    return _fused_infer_op(any(on_device))(
        query,
        key,
        value,
        pse_shift=call.pse_shift,
        atten_mask=call.atten_mask,
        actual_seq_lengths=call.query_lengths,
        actual_seq_lengths_kv=call.kv_lengths,
        quant_scale2=call.quant_scale2,
        quant_offset2=call.quant_offset2,
        block_table=call.block_table,
        query_padding_size=call.query_padding_size,
        kv_padding_size=call.kv_padding_size,
        num_heads=call.shape.heads,
        scale=call.scale,
        pre_tokens=call.pre_tokens,
        next_tokens=call.next_tokens,
        input_layout=call.input_layout,
        num_key_value_heads=call.shape.kv_heads,
        sparse_mode=call.sparse_mode,
        inner_precise=call.inner_precise,
        block_size=call.block_size,
        softmax_lse_flag=call.softmax_lse_flag,
    )


def _fused_infer_op(device_lengths: bool) -> Any:
    """The eager op takes lengths as lists; torchair's twin, for max-autotune graphs only, as device tensors."""
    if not device_lengths:
        return _torch_npu().npu_fused_infer_attention_score
    # torchair.ops.npu_fused_infer_attention_score under its dispatcher name, which a graph can be traced through;
    # graph.py loads it before it compiles
    return torch.ops.air.npu_fused_infer_attention_score


def npu_dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None, dst_type: torch.dtype | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    # 2.1.0 knows pertoken only and has no such argument, so it is passed where it says something else.
    mode = {} if quant_mode == "pertoken" else {"quant_mode": quant_mode}
    return _torch_npu().npu_dynamic_quant(input, smooth_scales=smooth_scales, dst_type=dst_type, **mode)


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
    return _torch_npu().npu_quant_matmul(
        x1, x2, scale, offset=offset, pertoken_scale=pertoken_scale, bias=bias, output_dtype=output_dtype
    )


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
    ascend_weight_quant_sides(weight)
    return _torch_npu().npu_weight_quant_batchmatmul(
        x,
        weight,
        antiquant_scale,
        antiquant_offset=antiquant_offset,
        quant_scale=quant_scale,
        quant_offset=quant_offset,
        bias=bias,
        antiquant_group_size=antiquant_group_size,
    )


def npu_trans_quant_param(scale: Tensor, offset: Tensor | None) -> Tensor:
    return _torch_npu().npu_trans_quant_param(scale, offset=offset)


def npu_mm_all_reduce_base(
    x1: Tensor, x2: Tensor, hcom: str, *, reduce_op: str, bias: Tensor | None, x3: Tensor | None, comm_turn: int
) -> Tensor:
    return _torch_npu().npu_mm_all_reduce_base(x1, x2, hcom, reduce_op=reduce_op, bias=bias, x3=x3, comm_turn=comm_turn)
