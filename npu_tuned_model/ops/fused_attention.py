"""Prefill's and decode's attention calls, served by the one operator that does both (FIA).

For chips without PFA and IFA, and for captured graphs. The arguments and results are those of
npu_prompt_flash_attention and npu_incre_flash_attention as far as the network uses them.
"""

from __future__ import annotations

from torch import Tensor

from .attention import npu_fused_infer_attention_score
from .attention_checks import Lengths


def prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
) -> Tensor:
    """npu_prompt_flash_attention through npu_fused_infer_attention_score."""
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=atten_mask,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
    )[0]


def incremental(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
) -> Tensor:
    """npu_incre_flash_attention through npu_fused_infer_attention_score; actual_seq_lengths are the KV lengths."""
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=atten_mask,
        actual_seq_lengths_kv=actual_seq_lengths,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
    )[0]
