"""Where two texts part is found exactly, and the speed-up is against the better stock variant of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.comparison import GapProbe, agreement, first_differences, ratios

rows = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(rows, st.data())
def test_first_differences(ours: list[list[int]], data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 2), min_size=4, max_size=4)
    theirs = data.draw(st.lists(row, min_size=len(ours), max_size=len(ours)))
    expected = [
        next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), None)
        for one, other in zip(ours, theirs)
    ]
    assert first_differences(torch.tensor(ours), torch.tensor(theirs)) == expected


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        first_differences(torch.zeros(1, 2), torch.zeros(1, 3))


def test_agreement_is_the_share_of_equal_tokens() -> None:
    entry = agreement(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 4], [1, 9, 3, 9]]))
    assert entry == {"equal_share": 0.75, "first_difference_per_row": [None, 1]}


def test_gap_is_read_where_the_texts_part_and_scores_stay_as_they_are() -> None:
    ours, theirs = torch.tensor([[5, 1, 2], [5, 5, 5]]), torch.tensor([[5, 3, 0], [5, 5, 5]])
    probe = GapProbe(ours, theirs)
    assert probe.steps == 2
    for step in range(probe.steps):
        scores = torch.arange(12.0).view(2, 6) * (step + 1)
        before = scores.clone()
        assert probe(torch.zeros(2, 1), scores) is scores
        assert torch.equal(scores, before)
    assert probe.gaps == [2 * (3.0 - 1.0), None]


def test_equal_texts_need_no_probing() -> None:
    assert GapProbe(torch.ones(2, 3), torch.ones(2, 3)).steps == 0


def figures(prefill: list[float], decode: list[Any]) -> list[dict[str, Any]]:
    return [{"prefill_ms": a, "decode_ms": b} for a, b in zip(prefill, decode)]


def test_ratio_is_against_the_better_stock_of_each_step() -> None:
    result = ratios(
        {
            "stock eager": figures([30, 30, 30], [4, 4, 4]),
            "stock sdpa": figures([20, 22, 24], [6, 6, 6]),
            "tuned": figures([10, 10, 8], [2, 1, 4]),
        }
    )
    assert result["prefill"]["against"] == "stock sdpa"
    assert result["prefill"]["ratio_per_round"] == pytest.approx([2.0, 2.2, 3.0])
    assert result["prefill"]["ratio"]["median"] == pytest.approx(2.2)
    assert result["decode"]["against"] == "stock eager"
    assert result["decode"]["ratio"] == {"median": 2.0, "min": 1.0, "max": 4.0}


def test_no_decode_no_ratio() -> None:
    result = ratios(
        {name: figures([1.0], [None]) for name in ("stock eager", "stock sdpa", "tuned")},
    )
    assert result["decode"] is None
