"""What every op refuses at its door, for all backends alike.

The checks look at shapes, dtypes and Python values only. They never read a tensor, so they cost no device
synchronisation and vanish when the caller is traced by torch.compile. A wrong argument raises ValueError with the
value, the limit and the way out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def refuse(op: str, message: str) -> ValueError:
    return ValueError(f"{op}: {message}")


def describe(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def rms_norm(input: Tensor, gamma: Tensor) -> None:
    op = "npu_rms_norm"
    if gamma.dim() < 1 or gamma.dim() > input.dim() or input.shape[input.dim() - gamma.dim() :] != gamma.shape:
        raise refuse(op, f"gamma {describe(gamma)} must equal the last dimensions of input {describe(input)}")
    if gamma.dtype not in (input.dtype, torch.float32):
        raise refuse(op, f"gamma is {gamma.dtype}; with a {input.dtype} input it must be {input.dtype} or float32")


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> None:
    op = "npu_add_rms_norm"
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        raise refuse(
            op, f"x1 {describe(x1)} {x1.dtype} and x2 {describe(x2)} {x2.dtype} must have the same shape and dtype"
        )
    if gamma.dim() < 1 or gamma.dim() > x1.dim() or x1.shape[x1.dim() - gamma.dim() :] != gamma.shape:
        raise refuse(op, f"gamma {describe(gamma)} must equal the last dimensions of x1 {describe(x1)}")
    if gamma.dtype != x1.dtype:
        raise refuse(op, f"gamma is {gamma.dtype}; it must be {x1.dtype} like x1, cast it once at load")


def _rotary_mode(op: str, rotary_mode: str) -> None:
    if rotary_mode != "half":
        raise refuse(op, f'rotary_mode "{rotary_mode}" is not supported, only "half"')


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str) -> None:
    op = "npu_apply_rotary_pos_emb"
    if layout != "BSND":
        raise refuse(op, f'layout "{layout}" is not supported, only "BSND": rotate before transposing the heads')
    _rotary_mode(op, rotary_mode)
    if query.dim() != 4 or key.dim() != 4:
        raise refuse(op, f"query {describe(query)} and key {describe(key)} must be 4-D (B, S, heads, D)")
    batch, length, _, head_dim = query.shape
    if key.shape[:2] != query.shape[:2] or key.shape[3] != head_dim:
        raise refuse(op, f"key {describe(key)} must have query's B, S and D, query is {describe(query)}")
    if head_dim % 2:
        raise refuse(op, f"head dimension {head_dim} is odd; the two halves must be equal")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if describe(tensor) != (batch, length, 1, head_dim):
            raise refuse(
                op,
                f"{name} is {describe(tensor)}, it must be (B, S, 1, D) = {(batch, length, 1, head_dim)}: "
                "both halves filled, no broadcast over the batch",
            )
    if not query.dtype == key.dtype == cos.dtype == sin.dtype:
        raise refuse(
            op,
            f"query {query.dtype}, key {key.dtype}, cos {cos.dtype} and sin {sin.dtype} must have one dtype; "
            "cast cos and sin once per step",
        )


def ascend_rotary_head_dim(head_dim: int) -> None:
    """The A2/A3 kernel behind npu_apply_rotary_pos_emb knows two head sizes; portable code takes any even one."""
    if head_dim not in (64, 128):
        raise refuse(
            "npu_apply_rotary_pos_emb",
            f"head dimension {head_dim} on an NPU; the kernel takes 64 or 128, use npu_rotary_mul for others",
        )


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> None:
    op = "npu_rotary_mul"
    _rotary_mode(op, rotary_mode)
    if input.dim() != 4 or input.shape[-1] % 2:
        raise refuse(op, f"input {describe(input)} must be 4-D with an even last dimension")
    for name, tensor in (("r1", r1), ("r2", r2)):
        fits = tensor.dim() == 4 and tensor.shape[-1] == input.shape[-1]
        if not fits or any(size not in (1, full) for size, full in zip(tensor.shape[:3], input.shape[:3])):
            raise refuse(op, f"{name} {describe(tensor)} must be 4-D, full in D and broadcast to {describe(input)}")
    if r1.shape != r2.shape:
        raise refuse(op, f"r1 {describe(r1)} and r2 {describe(r2)} must have the same shape")


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    op = "scatter_update_"
    rank = input.dim()
    if not 2 <= rank <= 8 or updates.dim() != rank:
        raise refuse(
            op, f"input {describe(input)} and updates {describe(updates)} must have the same rank, from 2 to 8"
        )
    if not -rank < axis < rank or axis == 0:
        raise refuse(op, f"axis {axis} is not allowed for rank {rank}: use 1..{rank - 1} or {1 - rank}..-1, never 0")
    if input.dtype != updates.dtype:
        raise refuse(op, f"updates are {updates.dtype}, input is {input.dtype}; they must be the same")
    if indices.dtype not in (torch.int32, torch.int64):
        raise refuse(op, f"indices are {indices.dtype}; they must be int32 or int64")
    rows = updates.shape[0]
    if indices.dim() not in (1, 2) or (indices.dim() == 2 and indices.shape[1] != 2):
        raise refuse(op, f"indices {describe(indices)} must be (rows,) offsets or (rows, 2) pairs of row and offset")
    if indices.shape[0] != rows:
        raise refuse(
            op, f"{indices.shape[0]} indices for {rows} rows of updates; expand a single position to one per row"
        )
    if rows > input.shape[0]:
        raise refuse(op, f"updates have {rows} rows, input has only {input.shape[0]}")
    axis %= rank
    for dim in range(1, rank):
        if dim != axis and updates.shape[dim] != input.shape[dim]:
            raise refuse(
                op, f"updates {describe(updates)} must equal input {describe(input)} but for dimensions 0 and {axis}"
            )
    if updates.shape[axis] > input.shape[axis]:
        raise refuse(
            op, f"{updates.shape[axis]} slots to write, but dimension {axis} of input holds {input.shape[axis]}"
        )


def swiglu(input: Tensor, dim: int) -> None:
    op = "npu_swiglu"
    if not -input.dim() <= dim < input.dim():
        raise refuse(op, f"dim {dim} is out of range for an input of rank {input.dim()}")
    if input.shape[dim] % 2:
        raise refuse(
            op, f"dimension {dim} of input {describe(input)} is odd; it must be cat(gate, up), two equal halves"
        )


def mm_all_reduce_base(x1: Tensor, x2: Tensor, reduce_op: str, bias: Tensor | None, x3: Tensor | None) -> None:
    op = "npu_mm_all_reduce_base"
    if reduce_op != "sum":
        raise refuse(op, f'reduce_op "{reduce_op}" is not supported, only "sum"')
    if x1.dim() not in (2, 3) or x2.dim() != 2 or x1.shape[-1] != x2.shape[0]:
        raise refuse(op, f"x1 {describe(x1)} must be (M, K) or (B, S, K) and x2 {describe(x2)} must be (K, N)")
    if x1.dtype != x2.dtype or not x1.dtype.is_floating_point:
        raise refuse(op, f"x1 is {x1.dtype} and x2 {x2.dtype}; both must have the same floating-point dtype")
    if bias is not None and describe(bias) != (x2.shape[1],):
        raise refuse(op, f"bias {describe(bias)} must be (N,) = {(x2.shape[1],)}")
    if x3 is not None and describe(x3) != (*x1.shape[:-1], x2.shape[1]):
        raise refuse(op, f"x3 {describe(x3)} must have the shape of the result {(*x1.shape[:-1], x2.shape[1])}")


def dynamic_quant(input: Tensor, smooth_scales: Tensor | None, dst_type: torch.dtype | None, quant_mode: str) -> None:
    op = "npu_dynamic_quant"
    if input.dim() < 2 or not input.dtype.is_floating_point:
        raise refuse(op, f"input {describe(input)} {input.dtype} must be floating-point with at least 2 dimensions")
    if quant_mode not in ("pertoken", "perchannel", "pertensor"):
        raise refuse(op, f'quant_mode "{quant_mode}" is not supported; choose from pertoken, perchannel, pertensor')
    if dst_type not in (None, torch.int8, torch.quint4x2):
        raise refuse(op, f"dst_type {dst_type} is not supported; choose torch.int8 or torch.quint4x2")
    if dst_type == torch.quint4x2 and input.shape[-1] % 8:
        raise refuse(op, f"last dimension {input.shape[-1]} must be a multiple of 8 for int4, packed 8 to an int32")
    if smooth_scales is not None and describe(smooth_scales) != (input.shape[-1],):
        raise refuse(op, f"smooth_scales {describe(smooth_scales)} must be (K,) = {(input.shape[-1],)}")


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> None:
    op = "npu_quant_matmul"
    if x1.dtype != torch.int8 or x2.dtype != torch.int8:
        raise refuse(op, f"x1 is {x1.dtype} and x2 {x2.dtype}; both must be int8")
    if x1.dim() < 2 or x2.dim() < 2 or x1.shape[-1] != x2.shape[-2]:
        raise refuse(op, f"x1 {describe(x1)} must be (.., M, K) and x2 {describe(x2)} (.., K, N)")
    rows, columns = x1.shape[-2], x2.shape[-1]
    if output_dtype not in (torch.int8, torch.float16, torch.bfloat16):
        raise refuse(op, f"output_dtype {output_dtype} must be torch.float16, torch.bfloat16 or torch.int8")
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.int64) or describe(scale) not in ((1,), (columns,)):
        raise refuse(
            op, f"scale {describe(scale)} {scale.dtype} must be (1,) or (N,) = ({columns},): float32, bfloat16 or int64"
        )
    if scale.dtype == torch.bfloat16 and output_dtype != torch.bfloat16:
        raise refuse(op, f"a bfloat16 scale gives bfloat16 output only, not {output_dtype}; use a float32 scale")
    if scale.dtype == torch.int64 and (pertoken_scale is not None or output_dtype == torch.bfloat16):
        raise refuse(op, "an int64 scale is for float16 or int8 output without pertoken_scale; use a float32 scale")
    if pertoken_scale is not None:
        if describe(pertoken_scale) != (rows,) or pertoken_scale.dtype != torch.float32:
            raise refuse(
                op, f"pertoken_scale {describe(pertoken_scale)} {pertoken_scale.dtype} must be ({rows},) float32"
            )
        if output_dtype == torch.int8:
            raise refuse(op, "pertoken_scale gives float16 or bfloat16 output, not int8")
    if offset is not None and (output_dtype != torch.int8 or describe(offset) not in ((1,), (columns,))):
        raise refuse(op, f"offset {describe(offset)} is for int8 output only and must be (1,) or ({columns},)")
    if bias is None:
        return
    allowed = [torch.int32]
    if output_dtype == torch.bfloat16:
        allowed += [torch.bfloat16, torch.float32]
    elif pertoken_scale is not None:
        allowed += [torch.float16, torch.float32]
    if bias.dtype not in allowed or bias.shape[-1] != columns:
        raise refuse(
            op, f"bias {describe(bias)} {bias.dtype} must end in N = {columns} and be one of {allowed} for this output"
        )


def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    antiquant_group_size: int,
) -> None:
    op = "npu_weight_quant_batchmatmul"
    if x.dim() != 2:
        raise refuse(op, f"x {describe(x)} must be 2-D (M, K): flatten the batch, the vendor's op takes M from dim 0")
    if not x.dtype.is_floating_point:
        raise refuse(op, f"x is {x.dtype}; it must be floating-point")
    if weight.dtype not in (torch.int8, torch.int32) or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise refuse(
            op, f"weight {describe(weight)} {weight.dtype} must be int8 (K, N) or int32 (K, N/8), K = {x.shape[1]}"
        )
    depth, columns = x.shape[1], weight.shape[1] * (8 if weight.dtype == torch.int32 else 1)
    group = antiquant_group_size
    if group:
        if group % 32 or not 32 <= group < depth:
            raise refuse(op, f"antiquant_group_size {group} must be a multiple of 32 from 32 to K - 1 = {depth - 1}")
        shapes: tuple[tuple[int, ...], ...] = (((depth + group - 1) // group, columns),)
    else:
        shapes = ((1,), (1, 1), (columns,), (1, columns))
    for name, tensor in (("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)):
        if tensor is not None and (describe(tensor) not in shapes or tensor.dtype != x.dtype):
            raise refuse(
                op,
                f"{name} {describe(tensor)} {tensor.dtype} must be {x.dtype} and one of {', '.join(map(str, shapes))}",
            )
    bias_dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    if bias is not None and (bias.dtype != bias_dtype or describe(bias) not in ((columns,), (1, columns))):
        raise refuse(op, f"bias {describe(bias)} {bias.dtype} must be ({columns},) {bias_dtype} for a {x.dtype} x")
    if quant_offset is not None and quant_scale is None:
        raise refuse(op, "quant_offset needs quant_scale")


def ascend_weight_quant_sides(weight: Tensor) -> None:
    if max(weight.shape) > 65535:
        raise refuse(
            "npu_weight_quant_batchmatmul",
            f"weight {describe(weight)} has a side of more than 65535, which an NPU doesn't take: cut it into pieces",
        )


def trans_quant_param(scale: Tensor, offset: Tensor | None, round_mode: int) -> None:
    op = "npu_trans_quant_param"
    if scale.dtype != torch.float32 or scale.dim() not in (1, 2) or (scale.dim() == 2 and scale.shape[0] != 1):
        raise refuse(op, f"scale {describe(scale)} {scale.dtype} must be float32 (t,) or (1, n)")
    if offset is not None and (offset.dtype != torch.float32 or describe(offset) not in (describe(scale), (1,))):
        raise refuse(op, f"offset {describe(offset)} {offset.dtype} must be float32 of scale's shape {describe(scale)}")
    if round_mode != 0:
        raise refuse(op, f"round_mode {round_mode} is not supported, only 0 (truncate)")
