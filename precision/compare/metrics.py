"""How far two tensors are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements looked at in one go, in float64.
CHUNK = 1 << 21


@dataclass
class TensorErrors:
    """The error of `target` against `golden`, over all elements.

    Attributes:
        cosine: 1 where both are zero, NaN where one is.
        max_abs, euclidean: largest absolute difference, L2 norm of the difference.
        relative_l2: euclidean / L2 norm of golden; what the verdict goes by.
        max_relative, mean_relative: of |target - golden| / |golden|; where golden is 0 a machine epsilon stands in.
        thousandth, five_thousandths: share of elements with a relative error below 0.001 and 0.005.
        equal: bit for bit, NaN at the same places included.
        misplaced: elements that are NaN or infinite on one side only, or of another kind.
    """

    cosine: float
    max_abs: float
    euclidean: float
    relative_l2: float
    max_relative: float
    mean_relative: float
    thousandth: float
    five_thousandths: float
    equal: bool
    misplaced: int


def tensor_errors(target: Tensor, golden: Tensor) -> TensorErrors:
    """Compare two tensors of one shape and any dtype (complex ones as pairs of numbers)."""
    if target.shape != golden.shape:
        raise ValueError(f"shapes differ: {tuple(target.shape)} and {tuple(golden.shape)}")
    equal = target.dtype == golden.dtype
    epsilon = max(_epsilon(golden.dtype), torch.finfo(torch.float32).eps)
    dot = target_square = golden_square = difference_square = relative_sum = 0.0
    max_abs = max_relative = 0.0
    misplaced = below_1 = below_5 = count = 0
    for ours, theirs in zip(_pieces(target), _pieces(golden)):
        kind, other = _kinds(ours), _kinds(theirs)
        misplaced += int((kind != other).sum())
        regular = (kind == 0) & (other == 0)
        ours, theirs = ours.where(regular, 0), theirs.where(regular, 0)
        difference = (ours - theirs).abs()
        equal = equal and not bool(difference.any())
        relative = difference / theirs.abs().where(theirs != 0, epsilon)
        dot += float(ours @ theirs)
        target_square += float(ours @ ours)
        golden_square += float(theirs @ theirs)
        difference_square += float(difference @ difference)
        relative_sum += float(relative.sum())
        max_abs, max_relative = max(max_abs, float(difference.max())), max(max_relative, float(relative.max()))
        below_1 += int((relative < 0.001).sum())
        below_5 += int((relative < 0.005).sum())
        count += ours.numel()
    norms = math.sqrt(target_square) * math.sqrt(golden_square)
    cosine = dot / norms if norms else (1.0 if target_square == golden_square else math.nan)
    euclidean = math.sqrt(difference_square)
    relative_l2 = euclidean / math.sqrt(golden_square) if golden_square else (0.0 if not euclidean else math.inf)
    share = max(count, 1)
    return TensorErrors(
        max(-1.0, min(1.0, cosine)) if not math.isnan(cosine) else cosine,
        max_abs,
        euclidean,
        relative_l2,
        max_relative,
        relative_sum / share,
        below_1 / share if count else 1.0,
        below_5 / share if count else 1.0,
        equal and not misplaced,
        misplaced,
    )


def _pieces(tensor: Tensor) -> list[Tensor]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)
    return (
        [
            piece.to(torch.float32).to(torch.float64)
            if piece.element_size() == 1 and piece.is_floating_point()
            else piece.to(torch.float64)
            for piece in flat.split(CHUNK)
        ]
        if flat.numel()
        else []
    )


def _kinds(values: Tensor) -> Tensor:
    """0 for numbers, 1 for NaN, 2 for infinity, 3 for minus infinity."""
    return values.isnan().to(torch.int8) + 2 * values.isposinf().to(torch.int8) + 3 * values.isneginf().to(torch.int8)


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
