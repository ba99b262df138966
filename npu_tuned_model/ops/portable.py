"""The op contract in plain torch, for CPU and CUDA: fast, and one graph for torch.compile.

Same results as the vendor's A2 kernels up to the last rounding: computed in float32, rounded where the kernels round.
No function reads a tensor back to the host or branches on its contents. Arguments were checked by the caller.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .attention_checks import AttentionCall
from .masked_attention import attention
from .quant import npu_dynamic_quant as npu_dynamic_quant
from .quant import npu_quant_matmul as npu_quant_matmul
from .quant import npu_trans_quant_param as npu_trans_quant_param
from .quant import npu_weight_quant_batchmatmul as npu_weight_quant_batchmatmul

# Values that eager mode on a CPU turns into float32 at a time: getting room for a whole prompt's from the system takes
# longer than computing them.
_EAGER_BLOCK = 2**18


def _inverse_rms(values: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    normalised = tuple(range(-gamma.dim(), 0))
    return torch.rsqrt(values.square().mean(normalised, keepdim=True) + epsilon)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    values = input.float()
    rstd = _inverse_rms(values, gamma, epsilon)
    return (values * rstd * gamma.float()).to(input.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    # A2 takes the variance of the rounded sum and rounds again before gamma; other chips do neither.
    total = x1 + x2
    values = total.float()
    rstd = _inverse_rms(values, gamma, epsilon)
    return (values * rstd).to(total.dtype) * gamma, rstd, total


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Against float32 cos and sin every product is computed in float32, without a float32 copy of the values.
    first, second = values.chunk(2, dim=-1)
    cos_first, cos_second = cos.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    # rounded before they are joined: the compiler stores the joined tensor, and half the bytes are enough
    rotated_first = (first * cos_first - second * sin_first).to(values.dtype)
    rotated_second = (second * cos_second + first * sin_second).to(values.dtype)
    return torch.cat((rotated_first, rotated_second), dim=-1)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.float(), sin.float()
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    return _rotate(input, r1.to(input.dtype).float(), r2.to(input.dtype).float())


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    axis %= input.dim()
    if axis == 1:
        slots, values = input, updates
    else:
        slots, values = input.movedim(axis, 1), updates.movedim(axis, 1)
    if indices.dim() == 2:
        rows, starts = indices[:, 0].long(), indices[:, 1]
    else:
        rows, starts = torch.arange(updates.shape[0], device=input.device), indices
    # Writing through index_put_ touches the written slots only; inductor turns it into stores into the cache itself.
    positions = starts.long()[:, None] + torch.arange(values.shape[1], device=input.device)
    slots.index_put_((rows[:, None], positions), values)
    return input


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    gate, up = input.chunk(2, dim=dim)
    if input.device.type != "cpu" or torch._dynamo.is_compiling() or gate.numel() <= _EAGER_BLOCK:
        return _swiglu(gate, up)
    result = torch.empty(gate.shape, dtype=input.dtype)
    rows = max(1, _EAGER_BLOCK * gate.shape[0] // gate.numel())
    for first in range(0, gate.shape[0], rows):
        block = slice(first, first + rows)
        result[block] = _swiglu(gate[block], up[block])
    return result


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.to(torch.float32, copy=True)
    return F.silu(wide, inplace=True).mul_(up).to(gate.dtype)


def npu_mm_all_reduce_base(
    x1: Tensor, x2: Tensor, hcom: str, *, reduce_op: str, bias: Tensor | None, x3: Tensor | None, comm_turn: int
) -> Tensor:
    partial = torch.matmul(x1, x2)
    if bias is not None:
        partial = partial + bias
    if x3 is not None:
        partial = partial + x3
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(partial)
    return partial


def npu_prompt_flash_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    return attention(query, key, value, call)[0]


def npu_incre_flash_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    return attention(query, key, value, call)[0]


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    return attention(query, key, value, call)
