"""The figures of a batch of tensors are those of a plain recomputation, whatever the tensors are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_runs import OPS, figures

from precision.monitor import statistics
from precision.monitor.statistics import HOST_PIECE, QUICK, SMALL, Batch

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=["kernel", "torch"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C++ kernel, and as on a machine where it can't be built."""
    assert statistics.kernels()
    if request.param == "torch":
        monkeypatch.setattr(statistics, "kernels", dict)


def measured(*tensors: torch.Tensor, lasting: bool = False, **options: object) -> list[dict[str, float]]:
    batch = Batch(CPU, **options)  # type: ignore[arg-type]
    places = [batch.add(tensor, lasting=lasting) for tensor in tensors]
    rows = batch.send().rows()
    return [dict(zip(OPS, rows[place])) for place in places]


def assert_same(found: dict[str, float], tensor: torch.Tensor) -> None:
    expected = figures(tensor)
    finite = [abs(expected[op]) for op in ("min", "max") if math.isfinite(expected[op])]
    for op in OPS:
        slack = 1e-6 * max(finite, default=0) if op == "mean" else 0.0
        same = math.isclose(found[op], expected[op], rel_tol=1e-5, abs_tol=slack)
        assert same or (math.isnan(found[op]) and math.isnan(expected[op])), (op, found, expected)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), max_size=3),
    dtype=st.sampled_from(DTYPES),
    zeros=st.floats(0, 1),
    nan=st.booleans(),
    seed=st.integers(0, 99),
)
def test_small_tensors(shape: list[int], dtype: torch.dtype, zeros: float, nan: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for _ in range(3):
        tensor = torch.randn(shape, generator=generator)
        tensor[torch.rand(shape, generator=generator) < zeros] = 0
        tensors.append(tensor.to(dtype))
    if nan:
        tensors[1].view(-1)[0] = math.nan
    for found, tensor in zip(measured(*tensors), tensors):
        assert_same(found, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [SMALL, SMALL + 1, HOST_PIECE, 2 * HOST_PIECE + 17])
@pytest.mark.parametrize("special", [None, math.nan, math.inf])
@pytest.mark.usefixtures("both_ways")
def test_large_tensors(dtype: torch.dtype, size: int, special: float | None) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    tensor[: size // 3] = 0
    tensor = tensor.to(dtype)
    if special is not None:
        # in the last piece
        tensor[-1] = special
    before = tensor.clone()
    assert_same(measured(tensor)[0], tensor)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [10, SMALL * 3])
@pytest.mark.parametrize("scale", [1e-38, 1e-22, 1e22])
def test_squares_that_float_cannot_hold(dtype: torch.dtype, size: int, scale: float) -> None:
    # the second moment of a gradient of 1e-9
    tensor = (torch.rand(size, dtype=torch.float64) * scale).to(dtype)
    assert_same(measured(tensor)[0], tensor)


@pytest.mark.usefixtures("both_ways")
def test_layouts_and_kinds() -> None:
    large = torch.randn(300, 400)
    for tensor in (
        large.t(),
        large[:, ::2],
        large[3:5].expand(2, 400),
        torch.randn(200, 20, 30).permute(2, 0, 1),
        torch.arange(100_000).view(100, -1),
        torch.rand(10, 10) > 0.5,
        torch.nn.Parameter(torch.randn(20_000)),
    ):
        assert_same(measured(tensor)[0], tensor)
    sparse = torch.randn(40, 400).to_sparse()
    assert_same(measured(sparse)[0], sparse.coalesce().values())
    assert all(math.isnan(value) for value in measured(torch.empty(0, 3))[0].values())


@pytest.mark.parametrize("size", [10, SMALL * 3])
def test_the_value_is_the_one_at_the_time(size: int) -> None:
    batch = Batch(CPU)
    tensor = torch.ones(size)
    first = batch.add(tensor, lasting=True)
    tensor.mul_(3)
    second = batch.add(tensor, lasting=True)
    rows = batch.send().rows()
    assert rows[first][OPS.index("max")] == 1
    assert rows[second][OPS.index("max")] == 3


def test_an_unchanged_tensor_is_measured_once() -> None:
    batch = Batch(CPU)
    tensor = torch.ones(QUICK + 1)
    assert batch.add(tensor, lasting=True) == batch.add(tensor, lasting=True)
    assert batch.add(tensor, lasting=True) != batch.add(tensor.clone(), lasting=True)


def test_only_what_is_asked_for_and_eps() -> None:
    for size in (100, SMALL * 2):
        tensor = torch.full((size,), 0.5)
        found = measured(tensor, ops=["max", "zeros"], eps=0.6)[0]
        assert found["max"] == 0.5
        assert found["zeros"] == 1
        assert math.isnan(found["min"])
        assert math.isnan(found["mean"])
        # an element of exactly eps is no zero
        assert measured(tensor, eps=0.5)[0]["zeros"] == 0


def test_values_travel_along_and_batches_begin_anew() -> None:
    batch = Batch(CPU)
    tensor = batch.add(torch.ones(3))
    first = batch.add_values(torch.tensor([4.0, 5.0]))
    rows = batch.send().rows()
    assert [rows[tensor][0], rows[first][0], rows[first + 1][0]] == [pytest.approx(3**0.5), 4, 5]
    assert batch.send().rows() == []
    # whatever figures of tensors are asked for
    alone = Batch(CPU, ops=["max"])
    alone.add_values(torch.tensor([4.0]))
    assert alone.send().rows()[0][0] == 4
    assert batch.add(torch.ones(3)) == 0


@pytest.mark.usefixtures("both_ways")
def test_more_small_tensors_than_are_kept() -> None:
    tensors = [torch.full((SMALL,), float(number)) for number in range(200)]
    assert [found["max"] for found in measured(*tensors)] == list(range(200))
