"""How far two results of one call are apart, over all their elements, in pieces that stay in the cache."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from precision.dump.host_statistics import host_figures
from precision.free_benchmark.host_distance import Rules, host_gap

# Elements of a block. A rounding error is at most half a unit in the last place of its own element, so no block of a
# correctly rounded result is off by more than that, and a few wrong elements stand out in theirs.
BLOCK = 1024
CHUNK = 1 << 18
# A block that is tiny beside the others is measured against this share of the mean block.
FLOOR = 0.01
# What is larger than this share of the narrower dtype's largest number is a mask's filler, not a number to measure.
FILLER = 0.5
TINY = torch.finfo(torch.float32).tiny


class Distance(NamedTuple):
    """
    Attributes:
        worst: largest relative L2 distance of any block; infinite where only one side is a number.
        overall: relative L2 distance of the whole.
        size: the L2 norm that it is relative to; NaN where that is not known.
    """

    worst: float
    overall: float
    size: float = math.nan

    def joined(self, other: Distance) -> Distance:
        return Distance(max(self.worst, other.worst), max(self.overall, other.overall))


ZERO = Distance(0.0, 0.0)
APART = Distance(math.inf, math.inf)


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
    result, other = result.detach().reshape(-1), other.detach().reshape(-1)
    huge = _huge(result.dtype, other.dtype)
    gap = host_gap(result, other, _rules(huge))
    if gap is not None:
        return Distance(gap.worst, gap.apart / max(gap.size, TINY), gap.size) if gap.alike else APART
    apart, size = _norms(result, other, huge)
    whole_apart, whole = (float(torch.linalg.vector_norm(norms)) for norms in (apart, size))
    if whole_apart == 0.0:
        return ZERO._replace(size=whole)
    if not whole_apart < math.inf:
        return APART
    floor = max(FLOOR * whole / len(size) ** 0.5, TINY)
    return Distance(float((apart / (size + floor)).amax()), whole_apart / max(whole, TINY), whole)


def norm_of(values: Tensor) -> float:
    """The L2 norm of a floating-point tensor; a mask's fillers, infinities and NaN are left out."""
    huge = _huge(values.dtype)
    figures = host_figures(values) if values.numel() and values.layout == torch.strided else None
    if figures is not None and figures.norm < huge:
        return figures.norm
    parts = [_block_norms(_wide(part)) for part in values.detach().reshape(-1).split(CHUNK)]
    whole = float(torch.linalg.vector_norm(torch.cat(parts) if len(parts) > 1 else parts[0]))
    if whole < huge:
        return whole
    wide = values.detach().double()
    return float(torch.linalg.vector_norm(torch.where(_kind(wide, huge) == 0, wide, 0)))


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


@functools.cache
def _huge(*dtypes: torch.dtype) -> float:
    return FILLER * min(torch.finfo(dtype).max for dtype in dtypes)


@functools.cache
def _rules(huge: float) -> Rules:
    return Rules(BLOCK, FLOOR, TINY, huge)


def _norms(ours: Tensor, theirs: Tensor, huge: float) -> tuple[Tensor, Tensor]:
    """L2 norms of the difference and of `theirs`, block by block."""
    apart, size = [], []
    for one, other in zip(ours.split(CHUNK), theirs.split(CHUNK)):
        one, other = _wide(one), _wide(other)
        gap, length = _block_norms(one - other), _block_norms(other)
        if not float(torch.maximum(gap, length).amax()) < huge:
            # NaN, infinity or a filler somewhere, or an overflow just here: to be looked at element by element
            gap, length = _norms_of_numbers(one.double(), other.double(), huge)
        apart.append(gap)
        size.append(length)
    return (apart[0], size[0]) if len(apart) == 1 else (torch.cat(apart), torch.cat(size))


def _norms_of_numbers(ours: Tensor, theirs: Tensor, huge: float) -> tuple[Tensor, Tensor]:
    """The same where not everything is a number; infinite where only one side is."""
    kind, other = _kind(ours, huge), _kind(theirs, huge)
    gap = torch.where((kind == 0) & (other == 0), ours - theirs, 0)
    gap = torch.where(kind != other, math.inf, gap)
    return _block_norms(gap), _block_norms(torch.where(other == 0, theirs, 0))


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _kind(values: Tensor, huge: float) -> Tensor:
    """0 for numbers, 1 for NaN, 2 and 3 for what is as good as infinite, by sign."""
    return values.isnan().to(torch.int8) + 2 * (values > huge).to(torch.int8) + 3 * (values < -huge).to(torch.int8)


def _block_norms(values: Tensor) -> Tensor:
    whole = values.numel() // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1))
    if whole < values.numel():
        parts.append(torch.linalg.vector_norm(values[whole:]).view(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
