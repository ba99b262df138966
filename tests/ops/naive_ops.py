"""Reference results in float64 by plain loops: slow, and written from the rules alone."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import torch
from torch import Tensor


def visible(
    mode: int,
    rows: int,
    slots: int,
    *,
    mask: Tensor | None = None,
    before: int = 2**31 - 1,
    after: int = 2**31 - 1,
    absolute: tuple[int, int] = (0, 0),
) -> list[list[bool]]:
    """Which of `slots` each of `rows` sees, inside the valid window that begins at `absolute` (row, slot)."""
    seen = []
    for i in range(rows):
        line = []
        for j in range(slots):
            if mode in (0, 1) and mask is not None:
                see = not bool(mask[absolute[0] + i, absolute[1] + j])
                if mode == 0:
                    see = see and i - before <= j <= i + after
            elif mode == 2:
                see = j <= i
            elif mode == 3:
                see = j <= i + slots - rows
            elif mode == 4:
                see = i + slots - rows - before <= j <= i + slots - rows + after
            else:
                see = True
            line.append(see)
        seen.append(line)
    return seen


def attend_row(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, bias: Sequence[float] | None = None
) -> tuple[Tensor, float]:
    """One query vector over the keys that it sees: (context, log-sum-exp), zeros and -inf if it sees none."""
    if not keys:
        return torch.zeros_like(query), -math.inf
    scores = [float(torch.dot(query, key)) * scale for key in keys]
    if bias is not None:
        scores = [score + shift for score, shift in zip(scores, bias)]
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    total = sum(weights)
    context = torch.zeros_like(values[0])
    for weight, value in zip(weights, values):
        context = context + value * (weight / total)
    return context, peak + math.log(total)


def attention_bsnd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Callable[[int, int, int], bool],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """BSND attention where `seen(batch, row, slot)`: (B, S, N, D) and log-sum-exp (B, N, S, 1), float64."""
    batch, rows, heads, _ = query.shape
    slots, kv_heads = key.shape[1], key.shape[2]
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros(batch, rows, heads, value.shape[3], dtype=torch.float64)
    lse = torch.zeros(batch, heads, rows, 1, dtype=torch.float64)
    for b in range(batch):
        for i in range(rows):
            columns = [j for j in range(slots) if seen(b, i, j)]
            for h in range(heads):
                kv = h // (heads // kv_heads)
                shift = None if bias is None else [float(bias[b % bias.shape[0], h, i, j]) for j in columns]
                keys = [key[b, j, kv] for j in columns]
                context, total = attend_row(query[b, i, h], keys, [value[b, j, kv] for j in columns], scale, shift)
                if columns:
                    out[b, i, h] = context
                lse[b, h, i, 0] = total
    return out, lse


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Float64, no rounding anywhere: (y, rstd)."""
    rows = input.double().reshape(-1, gamma.numel())
    out, rstd = torch.zeros_like(rows), []
    for index, row in enumerate(rows):
        inverse = 1 / math.sqrt(sum(float(x) ** 2 for x in row) / len(row) + epsilon)
        out[index] = row * inverse * gamma.double().reshape(-1)
        rstd.append(inverse)
    shape = (*input.shape[: input.dim() - gamma.dim()], *[1] * gamma.dim())
    return out.reshape(input.shape), torch.tensor(rstd, dtype=torch.float64).reshape(shape)


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-layout rotation of (.., D) by cos and sin that broadcast to it, float64."""
    values = values.double()
    cos, sin = (tensor.double().broadcast_to(values.shape) for tensor in (cos, sin))
    half = values.shape[-1] // 2
    out = torch.zeros_like(values)
    for d in range(values.shape[-1]):
        partner = -values[..., d + half] if d < half else values[..., d - half]
        out[..., d] = values[..., d] * cos[..., d] + partner * sin[..., d]
    return out


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """A new tensor with the runs of `updates` written into the rows of `input`."""
    out = input.clone()
    axis %= input.dim()
    for entry in range(updates.shape[0]):
        row, start = (entry, indices[entry]) if indices.dim() == 1 else (indices[entry, 0], indices[entry, 1])
        for k in range(updates.shape[axis]):
            out[int(row)].select(axis - 1, int(start) + k).copy_(updates[entry].select(axis - 1, k))
    return out


def swiglu(gate: float, up: float) -> float:
    return gate / (1 + math.exp(-gate)) * up
