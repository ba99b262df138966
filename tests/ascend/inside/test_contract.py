"""Every call of ops/ascend.py is one that the vendor's schema and shape check accept, with portable's results.

The calls go to the released torch_npu on fake npu tensors: its dispatcher checks the arguments, its Meta kernels the
shapes and dtypes. The older release's schemas are text (tests/ops/vendor_schemas).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_tuned_model import ops
from npu_tuned_model.ops import ascend, fused_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))
from vendor_schemas import OPERATORS, vendor_schemas

FEW = settings(max_examples=25, deadline=None)
SIZES = st.integers(1, 5)
HALF = st.sampled_from([torch.float16, torch.bfloat16])
FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
# query heads, key/value heads: the ratios of the published models, and without groups
HEADS = st.sampled_from([(14, 2), (12, 2), (28, 4), (8, 8), (4, 1)])
HEAD_DIM = st.sampled_from([64, 128])
OLD = vendor_schemas("2.1.0.post17")
# the one argument that the older release hasn't, passed only where it says something else than that release does
NEWER = {"npu_dynamic_quant": {"quant_mode"}}
seen: set[str] = set()


class Recorded:
    """torch_npu, with a look at every call of an operator: the older release must know its arguments, too."""

    def __init__(self) -> None:
        import torch_npu

        self.torch_npu = torch_npu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*positional: Any, **keyword: Any) -> Any:
            seen.add(name)
            arguments = OLD[name].arguments
            leading = [argument.name for argument in arguments if not argument.kwarg_only]
            assert len(positional) <= len(leading)
            names = {argument.name for argument in arguments} - set(leading[: len(positional)])
            assert set(keyword) <= names | NEWER.get(name, set())
            return getattr(self.torch_npu, name)(*positional, **keyword)

        return call


@pytest.fixture(autouse=True, scope="module")
def recorded():
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorded()
        patch.setattr(ascend, "_torch_npu", lambda: recorder)
        yield


def same_results(function: Callable[..., Any], make: Callable[[str], tuple[list[Any], dict[str, Any]]]) -> None:
    """Call with make's arguments on fake npu tensors, then on the CPU: shapes and dtypes must be equal."""
    described = []
    for device in ("npu", "cpu"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            positional, keyword = make(device)
            results = function(*positional, **keyword)
        results = [results] if isinstance(results, Tensor) else list(results)
        assert {result.device.type for result in results} == {device}
        described.append([(tuple(result.shape), result.dtype) for result in results])
    assert described[0] == described[1]


@FEW
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 200), FLOATS)
def test_norms(leading, width, dtype):
    def make(device):
        rows = torch.empty(*leading, width, dtype=dtype, device=device)
        return [rows, rows.clone(), torch.empty(width, dtype=dtype, device=device), 1e-6], {}

    same_results(ops.npu_add_rms_norm, make)
    same_results(ops.npu_rms_norm, lambda device: (make(device)[0][1:], {}))


@FEW
@given(SIZES, SIZES, HEADS, HEAD_DIM, FLOATS)
def test_rotary(batch, length, heads, head_dim, dtype):
    def make(device):
        def empty(*shape):
            return torch.empty(batch, length, *shape, dtype=dtype, device=device)

        return [empty(heads[0], head_dim), empty(heads[1], head_dim), empty(1, head_dim), empty(1, head_dim)], {}

    same_results(ops.npu_apply_rotary_pos_emb, make)
    same_results(ops.npu_rotary_mul, lambda device: ([make(device)[0][index] for index in (0, 2, 3)], {}))


@FEW
@given(SIZES, SIZES, st.integers(5, 9), HEADS, FLOATS, st.sampled_from([torch.int32, torch.int64]))
def test_cache_update(batch, length, slots, heads, dtype, index_dtype):
    def make(device):
        cache = torch.empty(batch, slots, heads[1], 64, dtype=dtype, device=device)
        updates = torch.empty(batch, length, heads[1], 64, dtype=dtype, device=device)
        return [cache, torch.empty(batch, dtype=index_dtype, device=device), updates, 1], {}

    same_results(ops.scatter_update_, make)


@FEW
@given(st.lists(SIZES, min_size=1, max_size=2), st.integers(1, 64), FLOATS)
def test_swiglu(leading, width, dtype):
    same_results(ops.npu_swiglu, lambda device: ([torch.empty(*leading, 2 * width, dtype=dtype, device=device)], {}))


@pytest.mark.parametrize("attention", [ops.npu_prompt_flash_attention, fused_attention.prompt])
@FEW
@given(SIZES, st.integers(2, 9), HEADS, HEAD_DIM, HALF)
def test_prompt_attention(attention, batch, length, heads, head_dim, dtype):
    def make(device):
        query = torch.empty(batch, length, heads[0], head_dim, dtype=dtype, device=device)
        key = torch.empty(batch, length, heads[1], head_dim, dtype=dtype, device=device)
        mask = torch.empty(2048, 2048, dtype=torch.bool, device=device)
        return [query, key, key.clone()], {
            **{"num_heads": heads[0], "num_key_value_heads": heads[1], "scale_value": head_dim**-0.5},
            **{"input_layout": "BSND", "atten_mask": mask, "sparse_mode": 3},
        }

    same_results(attention, make)


@pytest.mark.parametrize("attention", [ops.npu_incre_flash_attention, fused_attention.incremental])
@FEW
@given(st.data(), SIZES, st.integers(2, 9), HEADS, HEAD_DIM, HALF, st.booleans())
def test_decode_attention(attention, data, batch, slots, heads, head_dim, dtype, masked):
    lengths = data.draw(st.lists(st.integers(1, slots), min_size=batch, max_size=batch))

    def make(device):
        query = torch.empty(batch, 1, heads[0], head_dim, dtype=dtype, device=device)
        cache = torch.empty(batch, slots, heads[1], head_dim, dtype=dtype, device=device)
        mask = torch.empty(batch, 1, 1, slots, dtype=torch.bool, device=device)
        return [query, cache, cache.clone()], {
            **{"num_heads": heads[0], "num_key_value_heads": heads[1], "scale_value": head_dim**-0.5},
            **({"atten_mask": mask} if masked else {"actual_seq_lengths": lengths}),
            "input_layout": "BSND",
        }

    same_results(attention, make)


@FEW
@given(SIZES, st.integers(1, 4), st.integers(1, 8), HALF, st.sampled_from(["pertoken", "perchannel", "pertensor"]))
def test_quantised(rows, blocks, columns, dtype, quant_mode):
    width, out = 32 * blocks, 8 * columns

    def on(device, *shape, kind=dtype):
        return torch.empty(*shape, dtype=kind, device=device)

    def weights(device):
        return on(device, width, out, kind=torch.int8)

    same_results(ops.npu_dynamic_quant, lambda device: ([on(device, 2, rows, width)], {"quant_mode": quant_mode}))
    same_results(
        ops.npu_weight_quant_batchmatmul,
        lambda device: ([on(device, rows, width), weights(device), on(device, out)], {}),
    )
    # as linear_int8.py calls it, the attention projections' bias in the dtype that the operator wants
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    same_results(
        ops.npu_weight_quant_batchmatmul,
        lambda device: (
            [on(device, rows, width), weights(device), on(device, out)],
            {"bias": on(device, out, kind=wide)},
        ),
    )
    same_results(
        ops.npu_quant_matmul,
        lambda device: (
            [on(device, rows, width, kind=torch.int8), weights(device), on(device, out, kind=torch.float32)],
            {"output_dtype": dtype, "pertoken_scale": on(device, rows, kind=torch.float32)},
        ),
    )
    same_results(ops.npu_trans_quant_param, lambda device: ([on(device, out, kind=torch.float32)], {}))


def test_a_side_too_long_for_the_int8_matmul_is_refused():
    x, scale = torch.empty(1, 32, device="meta"), torch.empty(65536, device="meta")
    weight = torch.empty(32, 65536, dtype=torch.int8, device="meta")
    with pytest.raises(ValueError, match="more than 65535, which an NPU doesn't take: cut it"):
        ascend.npu_weight_quant_batchmatmul(x, weight, scale, None, None, None, None, 0)


@FEW
@given(SIZES, SIZES, st.integers(1, 64), st.integers(1, 64), HALF)
def test_matmul_and_all_reduce(batch, rows, width, out, dtype):
    def make(device):
        x1 = torch.empty(batch, rows, width, dtype=dtype, device=device)
        return [x1, torch.empty(width, out, dtype=dtype, device=device), "group"], {}

    same_results(ops.npu_mm_all_reduce_base, make)


def test_every_operator_was_called():
    assert seen == set(OPERATORS)


def test_the_stored_schemas_are_the_dispatchers():
    stored = vendor_schemas("2.13.0")
    for name in OPERATORS:
        live = getattr(torch.ops.npu, name).default._schema
        assert [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in stored[name].arguments] == [
            (a.name, str(a.type), a.default_value, a.kwarg_only) for a in live.arguments
        ]


def test_a_misspelled_argument_goes_red(monkeypatch):
    def misspelled(input, gamma, epsilon):
        return torch.ops.npu.npu_rms_norm(input, gamma, epsilom=epsilon)

    monkeypatch.setattr(ascend, "npu_rms_norm", misspelled)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'epsilom'"):
        test_norms()
