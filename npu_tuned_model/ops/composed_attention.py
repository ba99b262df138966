"""Attention by small ops: repeat the KV heads, multiply, mask, softmax in float32, multiply.

Positions follow the vendor's kernels: every sparse mode becomes a band around the main diagonal, counted from the
top-left corner of the valid window. Packed sequences are cut apart and computed one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_checks import FUSED, INCREMENTAL, AttentionCall, Lengths, is_decode

# No position is further away; keeps sums with positions far from the end of int64.
_FAR = 2**31


def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention output in the call's output layout, and the log-sum-exp, (0,) unless asked for."""
    source, target = call.input_layout.split("_")[0], call.input_layout.split("_")[-1]
    if call.shape.packed:
        context, lse = _packed(query, key, value, call, source)
        context = context if target == "TND" else context.transpose(0, 1)
    else:
        batch = call.shape.batch
        query = _heads_first(query, source, call.shape.heads)
        if call.block_table is None:
            key = _heads_first(key, source, call.shape.kv_heads)
            value = _heads_first(value, source, call.shape.kv_heads)
        else:
            lengths = _lengths(call.kv_lengths, batch, query.device)
            key = _read_pages(key, call, call.block_table, lengths).transpose(1, 2)
            value = _read_pages(value, call, call.block_table, lengths).transpose(1, 2)
        context, lse = _batched(query, key, value, call)
        if target in ("BSND", "BSH"):
            context = context.transpose(1, 2)
        if target == "BSH":
            context = context.reshape(batch, call.shape.query_len, -1)
        if target == "NBSD":
            context = context.transpose(0, 1)
    context = context.contiguous()
    if call.quant_scale2 is not None:
        scaled = context.to(torch.float32).mul(call.quant_scale2)
        scaled = scaled if call.quant_offset2 is None else scaled.add(call.quant_offset2)
        context = scaled.round().clip(-128, 127).to(torch.int8)
    return context, lse if call.softmax_lse_flag else torch.zeros(0, device=query.device)


def _heads_first(tensor: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BSH":
        tensor = tensor.reshape(tensor.shape[0], tensor.shape[1], heads, -1)
    return tensor if layout == "BNSD" else tensor.transpose(1, 2)


def _lengths(lengths: Lengths | None, batch: int, device: torch.device) -> Tensor:
    assert lengths is not None
    given = lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), device=device)
    return torch.stack([given[0 if len(lengths) == 1 else row] for row in range(batch)])


def _read_pages(cache: Tensor, call: AttentionCall, table: Tensor, lengths: Tensor) -> Tensor:
    """(B, slots, KVN, D), read token by token; slots behind the length repeat the last valid token."""
    shape, size = call.shape, call.block_size
    if cache.dim() == 4:
        cache = cache.transpose(1, 2)
    tokens = cache.reshape(-1, shape.kv_heads, shape.head_dim)
    slot = torch.arange(table.shape[1] * size, device=cache.device).expand(table.shape[0], -1)
    slot = torch.minimum(slot, (lengths - 1).clamp(min=0).unsqueeze(1))
    block = torch.gather(table.long(), 1, slot // size)
    # A sequence of length 0 owns no block, so its table entry may be anything.
    block = torch.where(lengths.unsqueeze(1) > 0, block, torch.zeros_like(block))
    return tokens[block * size + slot % size]


def _packed(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, layout: str) -> tuple[Tensor, Tensor]:
    """(T, N, D of value) and (T, N, 1)."""
    if isinstance(call.query_lengths, Tensor) or isinstance(call.kv_lengths, Tensor):
        raise ValueError(
            f"{call.rules.op}: composed attention cuts packed sequences apart and needs their lengths as lists"
        )
    assert call.query_lengths is not None
    assert call.kv_lengths is not None
    if layout == "NTD":
        query = query.transpose(0, 1)
        if call.block_table is None:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
    contexts, lses, row, slot = [], [], 0, 0
    for sequence, (row_end, kv) in enumerate(zip(call.query_lengths, call.kv_lengths)):
        if call.block_table is None:
            keys, values, slot = key[slot:kv], value[slot:kv], kv
        else:
            table = call.block_table[sequence : sequence + 1]
            length = torch.tensor([kv], device=query.device)
            keys = _read_pages(key, call, table, length)[0, :kv]
            values = _read_pages(value, call, table, length)[0, :kv]
        shape = call.shape._replace(batch=1, query_len=row_end - row, kv_len=keys.shape[0], packed=False)
        alone = call._replace(shape=shape, query_lengths=None, kv_lengths=None, block_table=None)
        q, k, v = (tensor.unsqueeze(0).transpose(1, 2) for tensor in (query[row:row_end], keys, values))
        context, lse = _batched(q, k, v, alone, may_ignore=False)
        contexts.append(context[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
        row = row_end
    return torch.cat(contexts), torch.cat(lses)


def _batched(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, may_ignore: bool = True
) -> tuple[Tensor, Tensor]:
    """BNSD in, BNSD and (B, N, Sq, 1) float32 out."""
    batch, heads, rows, _ = query.shape
    slots, group = key.shape[2], call.shape.heads // call.shape.kv_heads
    if slots == 0:
        lse = torch.full((batch, heads, rows, 1), float("-inf"), device=query.device)
        return query.new_zeros(batch, heads, rows, value.shape[3]), lse
    key = key[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, heads, slots, -1)
    value = value[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, heads, slots, -1)
    scores = torch.matmul(query, key.transpose(2, 3)) * call.scale
    if call.pse_shift is not None:
        scores = scores + call.pse_shift[..., :slots]
    hidden = _hidden(call, batch, rows, slots, query.device, may_ignore)[:, None]
    scores = scores.to(torch.float32)
    biased = scores + hidden.to(torch.float32) * torch.finfo(torch.float32).min
    weights = torch.softmax(biased, dim=-1, dtype=torch.float32).to(query.dtype)
    # not hidden.all(): torchair knows no such operator
    blind = ~(~hidden).any(-1, keepdim=True)
    context = torch.where(blind, torch.zeros((), dtype=query.dtype, device=query.device), torch.matmul(weights, value))
    peak = biased.amax(-1, keepdim=True)
    lse = peak + (biased - peak).exp().sum(-1, keepdim=True).log()
    return context, torch.where(blind, torch.full_like(lse, float("-inf")), lse)


def _hidden(call: AttentionCall, batch: int, rows: int, slots: int, device: torch.device, may_ignore: bool) -> Tensor:
    """(B, Sq, Skv) True where query row i must not see KV slot j."""
    decode = may_ignore and call.rules in (INCREMENTAL, FUSED) and is_decode(call)
    query_begin, query_end = _bounds(
        None if decode else call.query_lengths, call.query_padding_size, batch, rows, device
    )
    kv_begin, kv_end = _bounds(call.kv_lengths, call.kv_padding_size, batch, slots, device)
    row = torch.arange(rows, device=device).repeat(batch, 1)
    slot = torch.arange(slots, device=device).repeat(batch, 1)
    outside_rows = (row < query_begin) | (row >= query_end)
    outside_slots = (slot < kv_begin) | (slot >= kv_end) | (kv_begin < 0)
    hidden = outside_rows[:, :, None] | outside_slots[:, None, :] | (query_begin < 0)[:, :, None]
    if call.atten_mask is not None and call.sparse_mode in (0, 1):
        mask = call.atten_mask[..., :slots].bool()
        if decode:
            mask = mask.reshape(batch, 1, slots)
        elif mask.dim() == 4:
            mask = mask[:, 0]
        hidden = hidden | mask
    if decode or call.sparse_mode == 1 or (call.sparse_mode == 0 and call.atten_mask is None):
        return hidden
    shift = (kv_end - kv_begin) - (query_end - query_begin)
    back, ahead = torch.full_like(shift, _FAR), torch.full_like(shift, _FAR)
    if call.sparse_mode == 0:
        back, ahead = torch.full_like(shift, call.pre_tokens), torch.full_like(shift, call.next_tokens)
    elif call.sparse_mode == 2:
        ahead = torch.zeros_like(shift)
    elif call.sparse_mode == 3:
        ahead = shift
    elif call.sparse_mode == 4:
        back, ahead = call.pre_tokens - shift, call.next_tokens + shift
    distance = (slot - kv_begin)[:, None, :] - (row - query_begin)[:, :, None]
    return hidden | (distance > ahead[:, :, None]) | (-distance > back[:, :, None])


def _bounds(
    lengths: Lengths | None, padding: Tensor | None, batch: int, slots: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First slot of the valid window and the one behind its last, (B, 1) each."""
    if lengths is None:
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return zeros, zeros + slots
    length = _lengths(lengths, batch, device)[:, None]
    if padding is None:
        return torch.zeros_like(length), length
    end = slots - torch.maximum(padding, torch.zeros_like(padding)).reshape(1, 1).expand(batch, 1)
    return end - length, end
