"""Tuned against stock: how much faster, are the tokens the same, and if not, was it a tie that rounding decided?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmark.generate import Subject, generate
from benchmark.metrics import Spread
from benchmark.workload import Workload

TUNED = "tuned"


def first_differences(ours: Tensor, theirs: Tensor) -> list[int | None]:
    """Index of each row's first differing token, None where all agree.

    Args:
        ours, theirs: (batch, tokens) generated tokens without the prompt.

    Raises:
        ValueError: for unequal shapes.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: {tuple(ours.shape)} and {tuple(theirs.shape)}")
    rows: list[int | None] = []
    for different in (ours != theirs).tolist():
        rows.append(different.index(True) if True in different else None)
    return rows


def agreement(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Share of equal tokens, and each row's first difference."""
    return {
        "equal_share": float((ours == theirs).float().mean()),
        "first_difference_per_row": first_differences(ours, theirs),
    }


class GapProbe:
    """A logits processor that changes nothing and notes, where two texts part, how close the two candidates were.

    Run it with the model that wrote `theirs`: up to the first difference both texts are the same, so there its logits
    for the two tokens tell whether rounding decided (a small gap) or something is wrong (a large one).

    Attributes:
        gaps: logit of their token minus logit of ours, per row; None where the texts don't differ.
    """

    def __init__(self, ours: Tensor, theirs: Tensor) -> None:
        self.first = first_differences(ours, theirs)
        self.gaps: list[float | None] = [None] * len(self.first)
        self._ours, self._theirs = ours, theirs
        self._step = 0

    @property
    def steps(self) -> int:
        """Tokens to generate until every difference has been seen."""
        return max((index + 1 for index in self.first if index is not None), default=0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (batch, vocabulary), returned as they are."""
        for row, index in enumerate(self.first):
            if index == self._step:
                theirs, ours = int(self._theirs[row, index]), int(self._ours[row, index])
                self.gaps[row] = float(scores[row, theirs] - scores[row, ours])
        self._step += 1
        return scores


def ratios(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How many times faster the tuned model was than the better stock variant, round by round.

    Args:
        rounds: figures of each round (see round_figures) by subject; the tuned one is TUNED.

    Returns:
        for "prefill" and "decode": against (the stock variant with the better median), ratio, ratio_per_round; or
        None where there was no decode.
    """
    result: dict[str, Any] = {}
    for step in ("prefill", "decode"):
        key = f"{step}_ms"
        if rounds[TUNED][0][key] is None:
            result[step] = None
            continue
        medians = {
            name: Spread.of([values[key] for values in figures]).median
            for name, figures in rounds.items()
            if name != TUNED
        }
        best = min(medians, key=lambda name: medians[name])
        per_round = [theirs[key] / ours[key] for theirs, ours in zip(rounds[best], rounds[TUNED])]
        result[step] = {"against": best, "ratio": Spread.of(per_round).as_dict(), "ratio_per_round": per_round}
    return result


def token_agreement(
    subjects: list[Subject], tokens: dict[str, Tensor], workload: Workload, device: torch.device
) -> dict[str, Any]:
    """Tuned against each stock variant, and the two stock variants against each other as the yardstick."""
    stock = [subject for subject in subjects if subject.name != TUNED]
    pairs = [(TUNED, subject) for subject in stock] + [(stock[1].name, stock[0])]
    result = {}
    for ours, reference in pairs:
        entry = agreement(tokens[ours], tokens[reference.name])
        probe = GapProbe(tokens[ours], tokens[reference.name])
        if probe.steps:
            reference.use()
            generate(reference.model, workload, device=device, probe=probe, steps=probe.steps)
        entry["logit_gap_per_row"] = probe.gaps
        result[f"{ours} against {reference.name}"] = entry
    return result
