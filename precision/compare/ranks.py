"""Putting the tensors of tensor-parallel ranks together, to be held against a single process's."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor


def combine(parts: Sequence[Tensor], shape: Sequence[int], sections: Sequence[int] | None = None) -> tuple[Tensor, str]:
    """One tensor of the golden's shape from one per rank, and how it was made.

    Args:
        parts: in the order of ranks, one shape.
        shape: golden's.
        sections: for a fused weight or result, the sizes of its pieces per rank along the split dimension; each piece
            is put together on its own, as (q, k, v) of each rank to all q, all k, all v.

    Returns:
        the tensor and "one rank", "replicated", "joined along dimension D", "summed" or "" where nothing fits.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, "one rank"
    if list(first.shape) == list(shape):
        if all(torch.equal(part, first) for part in parts[1:]):
            return first, "replicated"
        # a row-parallel layer's result before the all-reduce
        return torch.stack([part.double() for part in parts]).sum(0).to(first.dtype), "summed"
    for dimension in range(first.dim()):
        rest = [size for index, size in enumerate(first.shape) if index != dimension]
        golden_rest = [size for index, size in enumerate(shape) if index != dimension]
        total = sum(part.shape[dimension] for part in parts)
        if first.dim() == len(shape) and rest == golden_rest and total == shape[dimension]:
            return _join(parts, dimension, sections), f"joined along dimension {dimension}"
    return first, ""


def _join(parts: Sequence[Tensor], dimension: int, sections: Sequence[int] | None) -> Tensor:
    if not sections:
        return torch.cat(list(parts), dim=dimension)
    pieces = [part.split(list(sections), dim=dimension) for part in parts]
    return torch.cat([torch.cat(column, dim=dimension) for column in zip(*pieces)], dim=dimension)
