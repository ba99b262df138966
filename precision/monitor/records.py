"""What a step's figures belong to: one row of a CSV file each."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

# The files, in the order in which a training step makes their rows; the first alert is the first in this order.
KINDS = (
    "actv",
    "generation",
    "loss",
    "actv_grad",
    "grad_unreduced",
    "grad_reduced",
    "param_origin",
    "exp_avg",
    "exp_avg_sq",
    "param_updated",
)
SCALAR_KINDS = ("generation", "loss")
MICRO_STEP_KINDS = ("actv", "actv_grad")
# Appended to the names of a module that is called again in the same forward pass.
_REPEATED = re.compile(r"\.call\d+$")


class Record(NamedTuple):
    """A tensor that was measured.

    Attributes:
        kind: one of KINDS, or the name of another state of the optimizer.
        name: of the row.
        row: number of its figures.
        micro_step: forward pass within the step.
        vpp_stage: place in the list of models.
    """

    kind: str
    name: str
    row: int
    shape: torch.Size
    dtype: torch.dtype
    micro_step: int
    vpp_stage: int


class Scalar(NamedTuple):
    """A single figure of a step, such as the loss."""

    kind: str
    name: str
    value: float


def kind_order(kind: str) -> int:
    """For sorting by the order within a step."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def module_of(kind: str, name: str) -> str:
    """The module that a row's name belongs to."""
    if kind in SCALAR_KINDS:
        return name
    return _REPEATED.sub("", name).rpartition(".")[0]
