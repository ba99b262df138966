"""The vendor's three attention signatures, each brought to one checked AttentionCall.

The public ops and their composed twins both come through here, so both refuse the same calls.
"""

from __future__ import annotations

from torch import Tensor

from .attention_checks import FUSED, INCREMENTAL, PROMPT, UNLIMITED, AttentionCall, Lengths, check_attention


def prompt_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale_value: float,
    num_heads: int,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Lengths | None = None,
    sparse_mode: int = 0,
) -> AttentionCall:
    """npu_prompt_flash_attention; raises ValueError."""
    return check_attention(
        PROMPT,
        query,
        key,
        value,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        input_layout=input_layout,
        scale=scale_value,
        atten_mask=atten_mask,
        pse_shift=pse_shift,
        query_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        sparse_mode=sparse_mode,
    )


def incremental_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale_value: float,
    num_heads: int,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
    block_table: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> AttentionCall:
    """npu_incre_flash_attention; raises ValueError. Its actual_seq_lengths are the KV lengths."""
    return check_attention(
        INCREMENTAL,
        query,
        key,
        value,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        input_layout=input_layout,
        scale=scale_value,
        atten_mask=atten_mask,
        pse_shift=pse_shift,
        kv_lengths=actual_seq_lengths,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        block_table=block_table,
        block_size=block_size,
        kv_padding_size=kv_padding_size,
        inner_precise=inner_precise,
    )


def fused_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    num_heads: int,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
    actual_seq_lengths_kv: Lengths | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> AttentionCall:
    """npu_fused_infer_attention_score; raises ValueError."""
    return check_attention(
        FUSED,
        query,
        key,
        value,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        input_layout=input_layout,
        scale=scale,
        atten_mask=atten_mask,
        pse_shift=pse_shift,
        query_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        block_table=block_table,
        block_size=block_size,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        softmax_lse_flag=softmax_lse_flag,
    )
