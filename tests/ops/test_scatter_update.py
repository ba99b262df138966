"""scatter_update_: runs of slots written in place, one start per row."""

from __future__ import annotations

import naive_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])


# The worked examples of the operator reference, 15.2.
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("axis", [2, -2])
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([1, 3], [[0, 1, 2, 0, 0, 0], [0, 0, 0, 3, 4, 0]]),
        ([[1, 0], [0, 4]], [[0, 0, 0, 0, 3, 4], [1, 2, 0, 0, 0, 0]]),
    ],
)
def test_worked_examples(table, dtype, axis, indices, expected):
    data = torch.zeros(2, 1, 6, 1)
    updates = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2, 1)
    out = table.scatter_update_(data, torch.tensor(indices, dtype=dtype), updates, axis)
    assert out is data
    assert data.view(2, 6).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32]),
    data=st.data(),
)
def test_against_loops(shape, dtype, data):
    axis = data.draw(st.integers(1, len(shape) - 1))
    rows = data.draw(st.integers(1, shape[0]))
    run = data.draw(st.integers(1, shape[axis]))
    starts = data.draw(st.lists(st.integers(0, shape[axis] - run), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        chosen = data.draw(st.permutations(range(shape[0])))[:rows]
        indices = torch.tensor(list(zip(chosen, starts)))
    else:
        indices = torch.tensor(starts)
    signed_axis = axis - len(shape) if data.draw(st.booleans()) else axis
    cache = torch.randint(-9, 9, shape).to(dtype)
    update_shape = [rows, *shape[1:]]
    update_shape[axis] = run
    updates = torch.randint(-9, 9, update_shape).to(dtype)
    expected = naive_ops.scatter_update(cache, indices, updates, axis)
    for table in (ops, composed):
        own = cache.clone()
        assert table.scatter_update_(own, indices, updates, signed_axis) is own
        torch.testing.assert_close(own, expected, atol=0, rtol=0)


@IMPLEMENTATIONS
def test_a_strided_cache_is_written_through(table):
    whole = torch.zeros(2, 8, 3, 4)
    table.scatter_update_(whole[:, 2:6], torch.tensor([0, 2]), torch.ones(2, 2, 3, 4), 1)
    assert whole.sum(dim=(2, 3)).tolist() == [[0, 0, 12, 12, 0, 0, 0, 0], [0, 0, 0, 0, 12, 12, 0, 0]]


@IMPLEMENTATIONS
def test_writing_past_the_end_raises_here(table):
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        table.scatter_update_(torch.zeros(1, 4, 1, 1), torch.tensor([3]), torch.ones(1, 2, 1, 1), 1)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": 0}, "axis 0 is not allowed for rank 4: use 1..3 or -3..-1, never 0"),
        ({"axis": -4}, "axis -4 is not allowed"),
        ({"axis": 4}, "axis 4 is not allowed"),
        ({"input": torch.zeros(2)}, "same rank, from 2 to 8"),
        ({"updates": torch.zeros(2, 1, 3)}, "same rank, from 2 to 8"),
        ({"updates": torch.zeros(2, 1, 3, 8).half()}, "updates are torch.float16, input is torch.float32"),
        ({"updates": torch.zeros(2, 1, 2, 8)}, "must equal input .* but for dimensions 0 and 1"),
        ({"updates": torch.zeros(2, 7, 3, 8)}, "7 slots to write, but dimension 1 of input holds 6"),
        ({"indices": torch.zeros(2)}, "indices are torch.float32; they must be int32 or int64"),
        ({"indices": torch.zeros(1, dtype=torch.int64)}, "1 indices for 2 rows of updates; expand a single position"),
        ({"indices": torch.tensor(0)}, r"indices \(\) must be \(rows,\) offsets"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, r"indices \(2, 3\) must be"),
        (
            {"updates": torch.zeros(3, 1, 3, 8), "indices": torch.zeros(3, dtype=torch.int64)},
            "updates have 3 rows, input has only 2",
        ),
    ],
)
def test_refusals(table, change, message):
    call = {
        "input": torch.zeros(2, 6, 3, 8),
        "indices": torch.zeros(2, dtype=torch.int64),
        "updates": torch.zeros(2, 1, 3, 8),
        "axis": 1,
    }
    with pytest.raises(ValueError, match=message):
        table.scatter_update_(**{**call, **change})
