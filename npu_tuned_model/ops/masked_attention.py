"""Portable attention for everything the vendor's operators know: masks, windows, pages, packed sequences, layouts.

One formulation serves all three ops. Every call is brought to BSND, the positions it may see become one boolean
array, and scaled_dot_product_attention does the rest. The two calls that a generation spends its time in go to
portable_attention.py instead.

Where the vendor's result is undefined (a query row that sees nothing, query slots outside the valid window) it is
zero here, with a log-sum-exp of -inf. Slots outside the valid window are not seen, but must hold finite numbers.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_checks import PROMPT, UNLIMITED, AttentionCall, AttentionShape, Lengths, is_decode
from .portable_attention import causal_prefill, windowed_decode
from .quant import to_int8

# 2.1.0 spells the default of pre_tokens 2147473647; no sequence is longer than either.
_AS_GOOD_AS_UNLIMITED = 2147473647


class _Positions(NamedTuple):
    """Where query rows or KV slots lie in their sequence; all fields broadcast to (batch, query rows, KV slots)."""

    relative: Tensor
    """Position counted from the first slot of the valid window."""
    length: Union[int, Tensor]
    """Slots in the valid window."""
    valid: Tensor | None
    """Inside the window; None: all are."""


def attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention output in the call's output layout, and the log-sum-exp, (0,) unless asked for."""
    call = _without_ignored(call)
    shape, device = call.shape, query.device
    source, target = call.input_layout.split("_")[0], call.input_layout.split("_")[-1]
    query_lengths = _as_tensor(call.query_lengths, shape.batch, device)
    kv_lengths = _as_tensor(call.kv_lengths, shape.batch, device)
    query = _to_bsnd(query, source, shape.heads)
    if call.block_table is not None:
        assert kv_lengths is not None
        key = _gather_pages(key, call.block_table, call.block_size, kv_lengths, shape)
        value = _gather_pages(value, call.block_table, call.block_size, kv_lengths, shape)
    else:
        key, value = _to_bsnd(key, source, shape.kv_heads), _to_bsnd(value, source, shape.kv_heads)

    lse = torch.zeros(0, dtype=torch.float32, device=device)
    if _is_window_decode(call):
        context = _window_decode(query, key, value, kv_lengths, call.scale)
    elif _is_causal_prefill(call):
        context = causal_prefill(query, key, value, scale=call.scale)
    else:
        allowed = _allowed(call, query_lengths, kv_lengths, device)
        context, full_lse = _masked_attention(query, key, value, allowed, call)
        if full_lse is not None:
            lse = full_lse.squeeze(0).transpose(0, 1) if shape.packed else full_lse
    context = _from_bsnd(context, target)
    if call.quant_scale2 is not None:
        offset = 0.0 if call.quant_offset2 is None else call.quant_offset2.float()
        context = to_int8(context.float() * call.quant_scale2.float() + offset)
    return context, lse


def _without_ignored(call: AttentionCall) -> AttentionCall:
    """The call without what the vendor's decode kernels do not look at: they know KV lengths and a full mask."""
    if call.rules is PROMPT or not is_decode(call):
        return call
    mask = None if call.sparse_mode >= 2 else call.atten_mask
    return call._replace(
        query_lengths=None, pre_tokens=UNLIMITED, next_tokens=UNLIMITED, sparse_mode=0, atten_mask=mask
    )


def _is_window_decode(call: AttentionCall) -> bool:
    extras = (call.atten_mask, call.pse_shift, call.kv_padding_size, call.query_lengths)
    return is_decode(call) and all(extra is None for extra in extras) and not call.softmax_lse_flag


def _is_causal_prefill(call: AttentionCall) -> bool:
    extras = (call.pse_shift, call.query_lengths, call.kv_lengths)
    square = call.shape.query_len == call.shape.kv_len and not call.shape.packed
    return call.sparse_mode in (2, 3) and square and all(e is None for e in extras) and not call.softmax_lse_flag


def _window_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, scale: float) -> Tensor:
    if lengths is None:
        lengths = torch.full((query.shape[0],), key.shape[1], dtype=torch.int64, device=query.device)
    return windowed_decode(query, key, value, lengths, scale=scale)


def _as_tensor(lengths: Lengths | None, batch: int, device: torch.device) -> Tensor | None:
    """(batch,) int64; a single length is shared by all rows, surplus ones are dropped as the vendor does."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    return lengths.expand(batch) if lengths.shape[0] == 1 else lengths[:batch]


def _to_bsnd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BSH":
        return tensor.unflatten(-1, (heads, tensor.shape[-1] // heads))
    if layout == "BNSD":
        return tensor.transpose(1, 2)
    if layout == "NTD":
        return tensor.transpose(0, 1).unsqueeze(0)
    return tensor.unsqueeze(0) if layout == "TND" else tensor


def _from_bsnd(tensor: Tensor, layout: str) -> Tensor:
    if layout == "BSH":
        return tensor.flatten(2)
    if layout == "BNSD":
        return tensor.transpose(1, 2).contiguous()
    if layout == "NBSD":
        return tensor.permute(2, 0, 1, 3).contiguous()
    if layout == "NTD":
        return tensor.squeeze(0).transpose(0, 1).contiguous()
    return tensor.squeeze(0) if layout == "TND" else tensor


def _gather_pages(cache: Tensor, table: Tensor, block_size: int, lengths: Tensor, shape: AttentionShape) -> Tensor:
    """Paged cache -> (B, blocks per sequence * block_size, KVN, D), all sequences end to end when packed."""
    used = torch.arange(table.shape[1], device=table.device) * block_size < lengths[:, None]
    blocks = cache[torch.where(used, table, 0).long()]
    blocks = blocks.unflatten(-1, (shape.kv_heads, shape.head_dim)) if cache.dim() == 3 else blocks.transpose(2, 3)
    dense = blocks.flatten(1, 2)
    return dense.flatten(0, 1).unsqueeze(0) if shape.packed else dense


def _allowed(
    call: AttentionCall, query_lengths: Tensor | None, kv_lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """(B or 1, Sq or 1, Skv) True where query row i sees KV slot j; None: everywhere."""
    conditions: list[Tensor] = []
    if call.shape.packed:
        assert query_lengths is not None
        assert kv_lengths is not None
        same_sequence, rows, slots = _packed_positions(call, query_lengths, kv_lengths, device)
        conditions.append(same_sequence)
    else:
        rows = _window(call.shape.query_len, query_lengths, call.query_padding_size, device, (1, -1, 1))
        slots = _window(call.shape.kv_len, kv_lengths, call.kv_padding_size, device, (1, 1, -1))
    conditions += [positions.valid for positions in (rows, slots) if positions.valid is not None]
    mode, before, after = call.sparse_mode, call.pre_tokens, call.next_tokens
    if call.atten_mask is not None and mode < 2:
        mask = call.atten_mask[..., : call.shape.kv_len]
        conditions.append(mask.reshape(-1, call.shape.query_len, call.shape.kv_len) == 0)
    # A row's own position in KV slots: counted from the first slot (modes 0 and 2) or so that the last row is the
    # last slot (3 and 4).
    own = rows.relative if mode in (0, 2) else rows.relative + (slots.length - rows.length)
    if mode in (2, 3):
        conditions.append(slots.relative <= own)
    elif mode == 4 or (mode == 0 and call.atten_mask is not None):
        if before < _AS_GOOD_AS_UNLIMITED:
            conditions.append(slots.relative >= own - before)
        if after < _AS_GOOD_AS_UNLIMITED:
            conditions.append(slots.relative <= own + after)
    if not conditions:
        return None
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = allowed & condition
    return allowed


def _window(
    slots: int, lengths: Tensor | None, padding: Tensor | None, device: torch.device, view: tuple[int, int, int]
) -> _Positions:
    """Positions of one axis: the window [0, length), or with padding the one that ends ``padding`` slots early."""
    index = torch.arange(slots, device=device).view(view)
    if lengths is None:
        return _Positions(index, slots, None)
    length = lengths.view(-1, 1, 1)
    if padding is None:
        return _Positions(index, length, index < length)
    start = slots - padding.reshape(1, 1, 1).clamp(min=0) - length
    relative = index - start
    return _Positions(relative, length, (start >= 0) & (relative >= 0) & (relative < length))


def _packed_positions(
    call: AttentionCall, query_ends: Tensor, kv_lengths: Tensor, device: torch.device
) -> tuple[Tensor, _Positions, _Positions]:
    """For sequences end to end: who shares a sequence with whom, and everyone's place in it."""
    query_sequence, query_begins = _sequence_of(query_ends, call.shape.query_len, device)
    if call.block_table is None:
        kv_sequence, kv_begins = _sequence_of(kv_lengths, call.shape.kv_len, device)
        kv_lengths = torch.diff(kv_lengths, prepend=kv_lengths.new_zeros(1))
    else:
        pages = call.shape.kv_len
        kv_sequence = torch.arange(call.shape.batch, device=device).repeat_interleave(pages)
        kv_begins = torch.arange(call.shape.batch, device=device) * pages
    query_lengths = torch.diff(query_ends, prepend=query_ends.new_zeros(1))
    row = torch.arange(query_sequence.shape[0], device=device) - query_begins[query_sequence]
    slot = torch.arange(kv_sequence.shape[0], device=device) - kv_begins[kv_sequence]
    rows = _Positions(row.view(1, -1, 1), query_lengths[query_sequence].view(1, -1, 1), None)
    valid = (slot < kv_lengths[kv_sequence]).view(1, 1, -1)
    slots = _Positions(slot.view(1, 1, -1), kv_lengths[query_sequence].view(1, -1, 1), valid)
    return (query_sequence[:, None] == kv_sequence[None, :]).unsqueeze(0), rows, slots


def _sequence_of(ends: Tensor, total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which sequence each of ``total`` tokens belongs to, and where each sequence begins."""
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    return torch.searchsorted(ends.contiguous(), torch.arange(total, device=device), right=True), begins


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor | None]:
    """BSND in, BSND out; the log-sum-exp (B, N, Sq, 1) float32 if the call asks for it."""
    batch, rows, heads, _ = query.shape
    kv_heads, group = call.shape.kv_heads, heads // call.shape.kv_heads
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = None if allowed is None else allowed.unsqueeze(1)
    if call.pse_shift is not None:
        bias = call.pse_shift[..., : key.shape[1]]
        mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    if rows == 1:
        # The heads that share a KV head become rows of one matmul: the cache is read once and never repeated.
        q = q.reshape(batch, kv_heads, group, -1)
        if mask is not None and mask.shape[1] == heads:
            mask = mask.reshape(-1, kv_heads, group, key.shape[1])
    elif group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)
    context = context.reshape(batch, heads, rows, -1).transpose(1, 2)
    if allowed is not None:
        context = context.masked_fill(~allowed.any(-1)[:, :, None, None], 0.0)
    if not call.softmax_lse_flag:
        return context, None
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * call.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return context, torch.logsumexp(scores, dim=-1).view(batch, heads, rows, 1)
