"""What the three attention ops refuse at their door, and the sizes of a call.

Shapes, dtypes and Python values only, never a device read; see checks.py. The rules are the vendor's (layouts, mask
shapes, lengths, left padding, paged caches), made strict where the vendor ignores an argument without a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Union

import torch
from torch import Tensor

from .checks import describe, refuse

Lengths = Union[Sequence[int], Tensor]

UNLIMITED = 2147483647
"""The vendor's "no limit" for pre_tokens and next_tokens."""

COMPRESSED_MASK_SIZE = 2048
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
_MAX_GROUP = 64
_MAX_HEAD_DIM = 512
_MAX_PACKED_SEQUENCES = 4096

_BATCHED_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")


class AttentionRules(NamedTuple):
    """What differs between the three attention ops at their door."""

    op: str
    layouts: tuple[str, ...]
    decode_only: bool
    kv_lengths_name: str


PROMPT = AttentionRules("npu_prompt_flash_attention", (*_BATCHED_LAYOUTS, "TND"), False, "actual_seq_lengths_kv")
INCREMENTAL = AttentionRules("npu_incre_flash_attention", ("BSH", "BSND", "BNSD"), True, "actual_seq_lengths")
FUSED = AttentionRules(
    "npu_fused_infer_attention_score",
    (
        *_BATCHED_LAYOUTS,
        *("BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
        *("TND", "NTD", "NTD_TND", "TND_NTD"),
    ),
    False,
    "actual_seq_lengths_kv",
)


class AttentionShape(NamedTuple):
    """The sizes of one attention call, whatever its layout."""

    batch: int
    query_len: int
    """Slots per sequence in the query tensor; for packed layouts the sum over all sequences."""
    kv_len: int
    """Slots per sequence in key and value (paged: blocks per sequence x block size); packed: the sum."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    packed: bool
    """Sequences lie end to end on one axis (TND, NTD) instead of one per batch row."""


class AttentionCall(NamedTuple):
    """The arguments of one checked attention call, under one set of names for all three ops."""

    rules: AttentionRules
    shape: AttentionShape
    scale: float
    input_layout: str
    sparse_mode: int = 0
    atten_mask: Tensor | None = None
    pse_shift: Tensor | None = None
    query_lengths: Lengths | None = None
    kv_lengths: Lengths | None = None
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED
    quant_scale2: Tensor | None = None
    quant_offset2: Tensor | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    query_padding_size: Tensor | None = None
    kv_padding_size: Tensor | None = None
    inner_precise: int = 0
    softmax_lse_flag: bool = False


def is_decode(call: AttentionCall) -> bool:
    """One query token per sequence, each sequence in a batch row of its own."""
    return call.shape.query_len == 1 and not call.shape.packed


def check_attention(
    rules: AttentionRules,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str,
    scale: float,
    **arguments: Any,
) -> AttentionCall:
    """Check one call against ``rules``.

    Args:
        rules: PROMPT, INCREMENTAL or FUSED.
        query, key, value: in ``input_layout``; key and value may be pages.
        arguments: further fields of AttentionCall.

    Raises:
        ValueError: any argument that the op would refuse, or ignore to the surprise of the caller.
    """
    op = rules.op
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        raise refuse(
            op,
            f"query {query.dtype}, key {key.dtype} and value {value.dtype} must have one floating-point dtype; "
            "quantised queries and caches are not supported",
        )
    if input_layout not in rules.layouts:
        raise refuse(op, f'input_layout "{input_layout}" is not supported; choose from {", ".join(rules.layouts)}')
    if num_heads < 1:
        raise refuse(op, f"num_heads is {num_heads}; it must be the number of query heads")
    kv_heads = num_key_value_heads or num_heads
    if kv_heads < 1 or num_heads % kv_heads or num_heads // kv_heads > _MAX_GROUP:
        raise refuse(
            op,
            f"num_heads {num_heads} must be a multiple (at most {_MAX_GROUP} times) of "
            f"num_key_value_heads {num_key_value_heads}",
        )
    shape = _attention_shape(
        op,
        query,
        key,
        value,
        layout=input_layout.split("_")[0],
        heads=num_heads,
        kv_heads=kv_heads,
        kv_lengths=arguments.get("kv_lengths"),
        block_table=arguments.get("block_table"),
        block_size=arguments.get("block_size", 0),
    )
    call = AttentionCall(rules=rules, shape=shape, scale=scale, input_layout=input_layout, **arguments)
    decode = is_decode(call)
    if rules.decode_only and not decode:
        raise refuse(op, f"query has S = {shape.query_len}; it takes S = 1 only, use npu_fused_infer_attention_score")
    if call.inner_precise not in ((0, 1) if decode else (0, 1, 2, 3)):
        raise refuse(op, f"inner_precise {call.inner_precise} must be {'0 or 1 when S is 1' if decode else '0 to 3'}")
    _check_all_lengths(call)
    _check_padding(call)
    _check_mask(call)
    if call.pse_shift is not None:
        _check_position_bias(op, query, shape, call.pse_shift, paged=call.block_table is not None)
    for name, tensor in (("quant_scale2", call.quant_scale2), ("quant_offset2", call.quant_offset2)):
        if tensor is not None and (tensor.numel() != 1 or not tensor.dtype.is_floating_point):
            raise refuse(op, f"{name} {describe(tensor)} {tensor.dtype} must be one floating-point value")
    if call.quant_offset2 is not None and call.quant_scale2 is None:
        raise refuse(op, "quant_offset2 needs quant_scale2")
    return call


def _attention_shape(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    heads: int,
    kv_heads: int,
    kv_lengths: Lengths | None,
    block_table: Tensor | None,
    block_size: int,
) -> AttentionShape:
    batch, query_len, head_dim = _sizes(op, "query", query, layout, heads)
    if block_table is not None:
        kv_len, value_dim = _paged_sizes(op, query, key, value, layout, kv_heads, head_dim, block_table, block_size)
    else:
        key_batch, kv_len, key_dim = _sizes(op, "key", key, layout, kv_heads)
        value_batch, value_len, value_dim = _sizes(op, "value", value, layout, kv_heads)
        if (key_batch, kv_len) != (value_batch, value_len) or key_batch != batch:
            raise refuse(
                op,
                f"query {describe(query)}, key {describe(key)} and value {describe(value)} disagree in batch or length",
            )
        if key_dim != head_dim:
            raise refuse(
                op,
                f"query has head dimension {head_dim} and key {key_dim} in layout {layout} "
                f"with {heads} and {kv_heads} heads",
            )
    packed = layout in ("TND", "NTD")
    if packed:
        batch = 0 if kv_lengths is None else len(kv_lengths)
        if block_table is not None and block_table.shape[0] != batch:
            raise refuse(op, f"block_table has {block_table.shape[0]} rows for {batch} sequences")
    elif value_dim != head_dim:
        raise refuse(op, f"value has head dimension {value_dim}, query and key have {head_dim}; they must be equal")
    if head_dim > _MAX_HEAD_DIM:
        raise refuse(op, f"head dimension {head_dim} is over the limit of {_MAX_HEAD_DIM}")
    return AttentionShape(batch, query_len, kv_len, heads, kv_heads, head_dim, value_dim, packed)


def _sizes(op: str, name: str, tensor: Tensor, layout: str, heads: int) -> tuple[int, int, int]:
    """(batch, length, head dimension) of a query, key or value; batch is 1 for packed layouts."""
    if tensor.dim() != len(layout):
        raise refuse(op, f"{name} {describe(tensor)} must have {len(layout)} dimensions in layout {layout}")
    if layout == "BSH":
        if tensor.shape[2] % heads:
            raise refuse(op, f"last dimension {tensor.shape[2]} of {name} is not a multiple of its {heads} heads")
        return tensor.shape[0], tensor.shape[1], tensor.shape[2] // heads
    if tensor.shape[layout.index("N")] != heads:
        raise refuse(
            op, f"{name} {describe(tensor)} has {tensor.shape[layout.index('N')]} heads in layout {layout}, not {heads}"
        )
    length = tensor.shape[layout.index("S" if "S" in layout else "T")]
    return (tensor.shape[0] if "B" in layout else 1), length, tensor.shape[layout.index("D")]


def _paged_sizes(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    kv_heads: int,
    head_dim: int,
    block_table: Tensor,
    block_size: int,
) -> tuple[int, int]:
    """(slots a block table can address per sequence, value head dimension) of a paged cache."""
    packed = layout in ("TND", "NTD")
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise refuse(op, f"block_table {describe(block_table)} {block_table.dtype} must be 2-D int32 (B, blocks)")
    if not packed and block_table.shape[0] != query.shape[0]:
        raise refuse(op, f"block_table has {block_table.shape[0]} rows for a batch of {query.shape[0]}")
    decode = not packed and query.shape[layout.index("S")] == 1
    step, largest = (16, 1024) if packed else (16, 512) if decode else (128, 512)
    if block_size < step or block_size % step or block_size > largest:
        raise refuse(op, f"block_size {block_size} must be a multiple of {step} and at most {largest}")
    if key.shape != value.shape or key.dim() not in (3, 4):
        raise refuse(op, f"paged key {describe(key)} and value {describe(value)} must have one shape, 3-D or 4-D")
    if key.dim() == 3:
        expected: tuple[int, ...] = (block_size, kv_heads * head_dim)
    elif layout in ("BNSD", "TND", "NTD"):
        expected = (kv_heads, block_size, head_dim)
    else:
        raise refuse(op, f"a 4-D paged cache needs a BNSD or TND query, not {layout}; use (blocks, block_size, KVN*D)")
    if describe(key)[1:] != expected:
        raise refuse(op, f"paged key {describe(key)} must be (blocks, {', '.join(str(size) for size in expected)})")
    return block_table.shape[1] * block_size, head_dim


def _check_all_lengths(call: AttentionCall) -> None:
    op, shape, kv_name = call.rules.op, call.shape, call.rules.kv_lengths_name
    query_lengths, kv_lengths = call.query_lengths, call.kv_lengths
    paged = call.block_table is not None
    if paged and kv_lengths is None:
        raise refuse(op, f"block_table needs {kv_name}: one KV length per sequence")
    if not shape.packed:
        if query_lengths is not None:
            _check_lengths(op, "actual_seq_lengths", query_lengths, shape.batch, shape.query_len)
        if kv_lengths is not None:
            _check_lengths(op, kv_name, kv_lengths, shape.batch, shape.kv_len)
        return
    if query_lengths is None or kv_lengths is None:
        raise refuse(op, f"packed layouts need actual_seq_lengths and {kv_name}")
    if len(query_lengths) != len(kv_lengths) or not 1 <= len(kv_lengths) <= _MAX_PACKED_SEQUENCES:
        raise refuse(
            op,
            f"actual_seq_lengths has {len(query_lengths)} entries and {kv_name} {len(kv_lengths)}; "
            f"packed layouts need one of each per sequence, at most {_MAX_PACKED_SEQUENCES}",
        )
    _check_cumulative(op, "actual_seq_lengths", query_lengths, shape.query_len)
    if paged:
        _check_lengths(op, kv_name, kv_lengths, shape.batch, shape.kv_len)
    else:
        _check_cumulative(op, kv_name, kv_lengths, shape.kv_len)


def _check_length_tensor(op: str, name: str, lengths: Tensor) -> None:
    if lengths.dim() != 1 or lengths.dtype != torch.int64:
        raise refuse(op, f"{name} {describe(lengths)} {lengths.dtype} must be a list of int or a 1-D int64 tensor")


def _check_lengths(op: str, name: str, lengths: Lengths, batch: int, limit: int) -> None:
    if isinstance(lengths, Tensor):
        _check_length_tensor(op, name, lengths)
    if len(lengths) != 1 and len(lengths) < batch:
        raise refuse(op, f"{name} has {len(lengths)} entries; give 1 for all, or one per row ({batch})")
    if not isinstance(lengths, Tensor):
        for length in lengths:
            if not 0 <= length <= limit:
                raise refuse(op, f"{name} holds {length}; each must be from 0 to {limit}, the slots there are")


def _check_cumulative(op: str, name: str, lengths: Lengths, total: int) -> None:
    if isinstance(lengths, Tensor):
        _check_length_tensor(op, name, lengths)
        return
    previous = 0
    for length in lengths:
        if length < previous:
            raise refuse(op, f"{name} {list(lengths)} must be cumulative: never smaller than the entry before")
        previous = length
    if previous != total:
        raise refuse(op, f"{name} ends with {previous}; in a packed layout it must end with {total}, all tokens")


def _check_padding(call: AttentionCall) -> None:
    op = call.rules.op
    for name, padding, lengths, lengths_name in (
        ("query_padding_size", call.query_padding_size, call.query_lengths, "actual_seq_lengths"),
        ("kv_padding_size", call.kv_padding_size, call.kv_lengths, call.rules.kv_lengths_name),
    ):
        if padding is None:
            continue
        if padding.numel() != 1 or padding.dtype != torch.int64:
            raise refuse(op, f"{name} {describe(padding)} {padding.dtype} must be one int64 value for all rows")
        if lengths is None:
            raise refuse(op, f"{name} would be ignored without {lengths_name}: give both or neither")
        if call.block_table is not None or call.shape.packed:
            raise refuse(op, f"{name} can't be combined with a paged cache or a packed layout")
    if is_decode(call) and call.query_padding_size is not None:
        raise refuse(op, "query_padding_size would be ignored with a query of S = 1: leave it out")


def _check_mask(call: AttentionCall) -> None:
    op, shape, mask, mode = call.rules.op, call.shape, call.atten_mask, call.sparse_mode
    if mode not in (0, 1, 2, 3, 4):
        raise refuse(op, f"sparse_mode {mode} is not supported; choose from 0, 1, 2, 3, 4")
    if mask is None:
        if mode == 1:
            raise refuse(op, "sparse_mode 1 needs atten_mask; without a mask use sparse_mode 0")
        if mode >= 2:
            raise refuse(op, f"sparse_mode {mode} needs atten_mask=compressed_causal_mask(device)")
        return
    if mask.dtype not in _MASK_DTYPES:
        raise refuse(
            op,
            f"atten_mask is {mask.dtype}; it must be bool, int8 or uint8 with True (1) where a position is "
            "masked OUT: the inverse of torch's boolean masks, and never an additive float mask",
        )
    size = COMPRESSED_MASK_SIZE
    if mode >= 2:
        if describe(mask) not in ((size, size), (1, size, size), (1, 1, size, size)):
            raise refuse(
                op,
                f"atten_mask {describe(mask)} with sparse_mode {mode} must be the constant {size} x {size} "
                "mask of compressed_causal_mask(device), whatever the lengths",
            )
        return
    if shape.packed:
        raise refuse(op, "packed layouts take no full mask: use sparse_mode 3, or 0 without mask")
    batch, rows, columns = shape.batch, shape.query_len, mask.shape[-1]
    if is_decode(call) and call.rules is not PROMPT:
        leading: tuple[tuple[int, ...], ...] = ((batch,), (batch, 1), (batch, 1, 1))
    else:
        leading = ((rows,), (1, rows), (batch, 1, rows), (1, 1, rows))
        if call.rules is PROMPT:
            leading += ((batch, rows),)
    # The vendor recommends columns padded to 32 bytes, and takes a mask as wide as the block table is.
    padded = (shape.kv_len + 31) // 32 * 32
    wide_enough = columns >= shape.kv_len if call.block_table is not None else columns in (shape.kv_len, padded)
    if describe(mask)[:-1] not in leading or not wide_enough:
        choices = ", ".join(str((*sizes, shape.kv_len)) for sizes in leading)
        raise refuse(op, f"atten_mask {describe(mask)} must be one of {choices}")


def _check_position_bias(op: str, query: Tensor, shape: AttentionShape, pse_shift: Tensor, paged: bool) -> None:
    if shape.packed:
        raise refuse(op, "packed layouts take no pse_shift")
    if pse_shift.dtype != query.dtype:
        raise refuse(op, f"pse_shift is {pse_shift.dtype}; it must be {query.dtype} like query")
    leading = ((shape.batch, shape.heads, shape.query_len), (1, shape.heads, shape.query_len))
    columns = pse_shift.shape[-1]
    wide_enough = columns >= shape.kv_len if paged else columns == shape.kv_len
    if describe(pse_shift)[:-1] not in leading or not wide_enough:
        expected = (*leading[0], shape.kv_len)
        raise refuse(op, f"pse_shift {describe(pse_shift)} must be (B or 1, N, Sq, Skv) = {expected}")


def host_lengths(op: str, name: str, lengths: Lengths | None) -> list[int] | None:
    """Lengths as the list the eager vendor ops want; refuses a tensor, which only FIA in a GE graph can take."""
    if isinstance(lengths, Tensor):
        raise refuse(
            op, f"{name} is a tensor; on an NPU it must be a list of int, or use npu_fused_infer_attention_score"
        )
    return None if lengths is None else list(lengths)
