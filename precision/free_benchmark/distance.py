"""How far two results of one call are apart, over all their elements, in pieces that stay in the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a block. A rounding error is at most half a unit in the last place of its own element, so no block of a
# correctly rounded result is off by more than that, and a few wrong elements stand out in theirs.
BLOCK = 1024
CHUNK = 1 << 18
# A block that is tiny beside the others is measured against this share of the mean block.
FLOOR = 0.01
# Anything larger is a mask's filler, not a number to measure.
HUGE = 1e18


class Distance(NamedTuple):
    """
    Attributes:
        worst: largest relative L2 distance of any block; infinite where only one side is a number.
        overall: relative L2 distance of the whole.
    """

    worst: float
    overall: float

    def joined(self, other: Distance) -> Distance:
        return Distance(max(self.worst, other.worst), max(self.overall, other.overall))


ZERO = Distance(0.0, 0.0)


def distance(result: Tensor, other: Tensor) -> Distance:
    """The distance of two tensors of one shape, relative to `other`; for integers and booleans the share that differs.

    Raises:
        ValueError: for different shapes.
    """
    if result.shape != other.shape:
        raise ValueError(f"shapes differ: {tuple(result.shape)} and {tuple(other.shape)}")
    if result.numel() == 0:
        return ZERO
    if result.device != other.device:
        result = result.to(other.device)
    if result.is_complex():
        result, other = torch.view_as_real(result.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not result.is_floating_point():
        share = float((result != other).double().mean())
        return Distance(share, share)
    ours, theirs = result.detach().reshape(-1), other.detach().reshape(-1)
    norms = [_norms(*piece) for piece in zip(ours.split(CHUNK), theirs.split(CHUNK))]
    apart, size = (torch.cat(column) for column in zip(*norms))
    whole_apart, whole = (float(torch.linalg.vector_norm(column)) for column in (apart, size))
    if whole_apart == 0.0:
        return ZERO
    if not whole_apart < float("inf"):
        return Distance(float("inf"), float("inf"))
    floor = FLOOR * whole / len(size) ** 0.5
    tiny = torch.finfo(size.dtype).tiny
    worst = float((apart / (size + max(floor, tiny))).amax())
    return Distance(worst, whole_apart / max(whole, tiny))


def same_bits(result: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if result.shape != other.shape or result.dtype != other.dtype:
        return False
    ours, theirs = result.detach().contiguous().view(-1), other.detach().contiguous().view(-1)
    width = ours.element_size() * ours.numel()
    if ours.dtype in (torch.bool, torch.int64) or ours.is_complex():
        return torch.equal(ours, theirs)
    # whole words compare several times faster
    aligned = width % 8 == 0 and not (ours.data_ptr() | theirs.data_ptr()) % 8
    word = torch.int64 if aligned else torch.uint8
    return torch.equal(ours.view(word), theirs.view(word))


def _norms(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """L2 norms of the difference and of `theirs`, block by block."""
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    ours, theirs = ours.to(wide), theirs.to(wide)
    apart, size = _block_norms(ours - theirs), _block_norms(theirs)
    # not finite: NaN or a mask's filler somewhere, to be looked at element by element
    if torch.isfinite(apart).all() and torch.isfinite(size).all() and float(size.amax()) < HUGE:
        return apart, size
    kind, other = _kind(ours), _kind(theirs)
    regular = (kind == 0) & (other == 0)
    gap = torch.where(regular, ours - theirs, 0)
    gap = torch.where(kind != other, float("inf"), gap)
    return _block_norms(gap), _block_norms(torch.where(regular, theirs, 0))


def _kind(values: Tensor) -> Tensor:
    """0 for numbers, 1 for NaN, 2 and 3 for what is as good as infinite, by sign."""
    return values.isnan().to(torch.int8) + 2 * (values > HUGE).to(torch.int8) + 3 * (values < -HUGE).to(torch.int8)


def _block_norms(values: Tensor) -> Tensor:
    whole = values.numel() // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1))
    if whole < values.numel():
        parts.append(torch.linalg.vector_norm(values[whole:]).view(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
