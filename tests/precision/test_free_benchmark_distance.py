"""The C++ kernel gives the distance of two results that torch's operators give, for every pair of dtypes and size."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision import cpp_library
from precision.free_benchmark import distance as module
from precision.free_benchmark import host_distance
from precision.free_benchmark.distance import BLOCK, Distance, distance, norm_of

PAIRS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
RULES = host_distance.Rules(BLOCK, 0.0, 1.0, 1e38)


def by_torch(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    with mock.patch.object(module, "host_gap", return_value=None):
        return distance(ours, theirs)


def by_kernel(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    assert cpp_library.why_not(host_distance.SOURCE) is None
    assert host_distance.host_gap(ours.view(-1), theirs.view(-1), RULES) is not None
    return distance(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    dtypes=st.sampled_from(PAIRS),
    count=st.one_of(st.integers(1, 200), st.integers(BLOCK - 70, BLOCK + 70), st.integers(4 * BLOCK, 5 * BLOCK)),
    wrong=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_the_kernel_agrees_with_torch(dtypes: Any, count: int, wrong: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-8, 8, (), generator=generator)
    ours, theirs = exact.to(dtypes[0]), exact.to(dtypes[1])
    ours[torch.randint(0, count, (wrong,), generator=generator)] *= -2
    assert tuple(by_kernel(ours, theirs)) == pytest.approx(tuple(by_torch(ours, theirs)), rel=1e-5)


@pytest.mark.parametrize("place", [0, 63, 64, BLOCK - 1, BLOCK, 2 * BLOCK + 64, 2 * BLOCK + 65])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_every_element_counts(dtypes: Any, place: int) -> None:
    ours, theirs = torch.ones(2 * BLOCK + 66, dtype=dtypes[0]), torch.ones(2 * BLOCK + 66, dtype=dtypes[1])
    assert by_kernel(ours, theirs)[:2] == (0.0, 0.0)
    ours[place] = 3
    found = by_kernel(ours, theirs)
    assert found.overall == pytest.approx(2 / math.sqrt(2 * BLOCK + 66))
    block = min(BLOCK, 2 * BLOCK + 66 - place // BLOCK * BLOCK)
    assert found.worst == pytest.approx(2 / math.sqrt(block), rel=0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.finfo(torch.bfloat16).min, 1e30])
@pytest.mark.parametrize("measure", [by_kernel, by_torch])
def test_what_is_no_number_counts_only_where_the_other_is_one(measure: Any, value: float) -> None:
    ours, theirs = torch.ones(2 * BLOCK), torch.ones(2 * BLOCK)
    ours[7] = theirs[7] = value
    theirs[8] = 2
    squares = 2 * BLOCK - 1 + 3 + (value**2 if value == 1e30 else 0)
    assert measure(ours, theirs).overall == pytest.approx(1 / math.sqrt(squares))
    assert norm_of(theirs) == pytest.approx(math.sqrt(squares))
    ours[7] = 1
    assert measure(ours, theirs).worst == pytest.approx(1.0 if value == 1e30 else math.inf, rel=0.1)
    ours[7], theirs[7] = -math.inf, math.inf
    assert measure(ours, theirs).worst == math.inf


def test_memory_the_kernel_must_not_read_is_left_to_torch() -> None:
    values = torch.randn(6, dtype=torch.complex64)
    negative = values.conj().imag
    assert negative.is_neg()
    assert distance(negative, -values.imag) == Distance(0.0, 0.0, pytest.approx(float(values.imag.norm())))
    transposed = torch.randn(5, 7).t()
    assert distance(transposed, transposed.contiguous()).overall == 0.0
