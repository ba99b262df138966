"""int8 weights: symmetric, one scale for each output feature, rounded to nearest (W8A16).

A scale belongs to a whole row of the unquantised weight, whichever part of the row a rank holds, and is a bfloat16
whatever the dtype of the model. So a plain checkpoint quantised while it loads and one that was quantised beforehand
give the same integers and the same scales, on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_tuned_model.checkpoint_layout import INT8
from npu_tuned_model.errors import UserError

LARGEST = 127
SCALE_DTYPE = torch.bfloat16


def check_weight_dtype(name: str | None) -> None:
    """Raise UserError unless `name` is "int8", or None for weights as they are."""
    if name not in (None, INT8):
        raise UserError(f"weight_dtype is {name!r}; it can be {INT8!r}, or None for weights in the model's dtype")


def row_scales(weight: Tensor) -> Tensor:
    """What each row's integers have to be multiplied by: (rows, in) floating-point -> (rows,) bfloat16.

    1 for a row of zeros.
    """
    scale = (weight.float().abs().amax(dim=1) / LARGEST).to(SCALE_DTYPE)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, in) floating-point -> int8 (rows, in) from -127 to 127, and their row_scales."""
    scale = row_scales(weight)
    # the scale was rounded, so the largest may come out a little above 127
    integers = (weight.float() / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return integers.to(torch.int8), scale
