"""The three attention ops of the contract, and the mask that three of their five sparse modes demand.

Legend: B batch, S sequence, N query heads, KVN key/value heads, D head dimension, H = N*D, T tokens of all sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_calls import fused_call, incremental_call, prompt_call
from .attention_checks import COMPRESSED_MASK_SIZE, UNLIMITED, Lengths
from .dispatch import backend

_compressed_masks: dict[torch.device, Tensor] = {}


def compressed_causal_mask(device: torch.device | str) -> Tensor:
    """The constant (2048, 2048) bool mask that sparse modes 2, 3 and 4 demand: True above the diagonal.

    It is the same for all lengths, also longer ones. One copy per device is kept.
    Source: CANN sparse_mode documentation, vllm-ascend attention_mask.py.
    """
    device = torch.device(device)
    mask = _compressed_masks.get(device)
    if mask is None:
        mask = torch.ones(COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE, dtype=torch.bool, device=device).triu(1)
        # A fake tensor, seen while a graph is exported, must not outlive its mode.
        if type(mask) is Tensor:
            _compressed_masks[device] = mask
    return mask


def npu_prompt_flash_attention(
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
) -> Tensor:
    """Attention of many query tokens (PFA). Without a mask, sparse_mode 0 is bidirectional, never causal.

    Which position (row i, slot j) is computed, counted inside the valid lengths Sq and Skv:
        0  without mask all; with a full mask where it is 0 and i - pre_tokens <= j <= i + next_tokens
        1  where the full mask is 0
        2  j <= i                      (mask: compressed_causal_mask)
        3  j <= i + Skv - Sq           (mask: compressed_causal_mask; chunked prefill)
        4  i + Skv - Sq - pre_tokens <= j <= i + Skv - Sq + next_tokens   (mask: compressed_causal_mask)

    Args:
        query: in ``input_layout``: BSH, BSND, BNSD, BNSD_BSND (output BSND) or TND. float16 or bfloat16; float32
            portable only. On an NPU contiguous; float16 runs its softmax in float16 there, prefer FIA.
        key, value: same layout and dtype with ``num_key_value_heads`` heads.
        scale_value: factor on the scores, 1/sqrt(D). Required: the vendor's default of 1.0 is never right.
        num_heads: N. Required: in BSH a wrong one changes D unnoticed.
        atten_mask: bool, int8 or uint8, True = masked OUT. Modes 0, 1: (Sq, Skv), (1, Sq, Skv), (B, Sq, Skv),
            (B, 1, Sq, Skv) or (1, 1, Sq, Skv). Modes 2 to 4: compressed_causal_mask, whose contents are not read.
        pse_shift: (B or 1, N, Sq, Skv), dtype of query, added to the scaled scores.
        actual_seq_lengths: valid query tokens per row, one for all or one per row; a list, or a 1-D int64 tensor
            (portable only). For TND cumulative.
        quant_scale2, quant_offset2: one value each; the result becomes int8: round(out * scale + offset).
        pre_tokens, next_tokens: limits for modes 0 and 4. next_tokens is unlimited here, not the vendor's 0.
        num_key_value_heads: KVN, 0 for N. Query head h uses key/value head h // (N / KVN).
        actual_seq_lengths_kv: valid key/value tokens, likewise.
        sparse_mode: 0 to 4.

    Returns:
        Shape of query (BNSD_BSND: (B, S, N, D); TND: (T, N, D of value)), its dtype or int8. Rows that see nothing,
        and rows past the valid length, are 0 here and undefined on an NPU.

    Raises:
        ValueError: every argument that contradicts another; on an NPU lengths given as a tensor.

    Source: torch_npu.npu_prompt_flash_attention (aclnnPromptFlashAttentionV3).
    """
    call = prompt_call(
        query,
        key,
        value,
        scale_value=scale_value,
        num_heads=num_heads,
        atten_mask=atten_mask,
        pse_shift=pse_shift,
        actual_seq_lengths=actual_seq_lengths,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        sparse_mode=sparse_mode,
    )
    return backend(query).npu_prompt_flash_attention(query, key, value, call)


def npu_incre_flash_attention(
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
) -> Tensor:
    """Attention of one query token per row onto the KV cache (IFA). Arguments not named here are as in PFA.

    Args:
        query: S = 1, in ``input_layout``: BSH, BSND or BNSD.
        key, value: same layout, or pages: (blocks, block_size, KVN*D), with BNSD also (blocks, KVN, block_size, D).
        atten_mask: (B, Skv), (B, 1, Skv) or (B, 1, 1, Skv), True = masked OUT.
        actual_seq_lengths: the KV lengths L, each with the current token already in the cache: a list, or a 1-D
            int64 tensor (portable only). The window of row b is [0, L_b).
        block_table: (B, blocks) int32: token t of row b is in block ``block_table[b, t // block_size]``.
        kv_padding_size: one int64 value p, the unused slots at the end. With it the window is right-aligned:
            [Skv - p - L_b, Skv - p), negative p counting as 0, and a window that begins before 0 gives zeros. So 0 is
            not None. Needs actual_seq_lengths.
        block_size: multiple of 16, at most 512.
        inner_precise: NPU only; 1 lets float16 run faster and less precisely, 0 doesn't. bfloat16 ignores it.

    Returns:
        Shape of query; its dtype, or int8 with quant_scale2. A row of length 0 is 0.

    Raises:
        ValueError: S other than 1, and every argument that contradicts another or would be ignored; on an NPU lengths
            given as a tensor.

    Source: torch_npu.npu_incre_flash_attention (aclnnIncreFlashAttentionV4).
    """
    call = incremental_call(
        query,
        key,
        value,
        scale_value=scale_value,
        num_heads=num_heads,
        atten_mask=atten_mask,
        pse_shift=pse_shift,
        actual_seq_lengths=actual_seq_lengths,
        block_table=block_table,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        kv_padding_size=kv_padding_size,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        block_size=block_size,
        inner_precise=inner_precise,
    )
    return backend(query).npu_incre_flash_attention(query, key, value, call)


def npu_fused_infer_attention_score(
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
) -> tuple[Tensor, Tensor]:
    """Attention for prefill and decode (FIA): PFA and IFA in one. Arguments not named here are as in those.

    With S = 1 (not in packed layouts) the vendor ignores actual_seq_lengths, sparse_mode, pre_tokens and next_tokens,
    and so do we: the row sees its whole window, less what a full mask hides.

    Args:
        query: in the part of ``input_layout`` before the underscore; the part behind it is the output's. One of BSH,
            BSND, BNSD, BNSD_BSND, BSH_BNSD, BSND_BNSD, BSH_NBSD, BSND_NBSD, BNSD_NBSD, TND, NTD, NTD_TND, TND_NTD.
            On an NPU TND wants D = 128.
        key, value: the same layout, or pages as in IFA (TND and NTD queries may use either form).
        atten_mask: S > 1: as in PFA without (B, Sq, Skv); S = 1: as in IFA. None or compressed for TND and NTD.
        actual_seq_lengths, actual_seq_lengths_kv: query and KV lengths; lists, or both 1-D int64 tensors (on an NPU
            inside a max-autotune graph only). Packed layouts need both, cumulative; with pages the KV lengths are
            plain ones.
        query_padding_size: like kv_padding_size (see IFA) for the query, S > 1 only; needs actual_seq_lengths.
        kv_padding_size: see IFA. With S > 1 a window that begins before 0 is invalid; portable code returns zeros.
        block_size: S = 1: multiple of 16, at most 512; S > 1: multiple of 128, at most 512; packed: multiple of 16,
            at most 1024.
        softmax_lse_flag: also return the log-sum-exp of the scaled, masked scores.

    Returns:
        ``(output, lse)``: lse is float32 (B, N, Sq, 1), for packed layouts (T, N, 1), -inf for rows that see nothing;
        (0,) without the flag.

    Raises:
        ValueError: every argument that contradicts another or would be ignored.

    Source: torch_npu.npu_fused_infer_attention_score (aclnnFusedInferAttentionScore).
    """
    call = fused_call(
        query,
        key,
        value,
        scale=scale,
        num_heads=num_heads,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        block_table=block_table,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        block_size=block_size,
        softmax_lse_flag=softmax_lse_flag,
    )
    return backend(query).npu_fused_infer_attention_score(query, key, value, call)
