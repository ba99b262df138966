"""The quantised linear ops: values, packing, and the combinations that the vendor's kernels refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model import ops
from npu_tuned_model.ops import composed
from npu_tuned_model.ops.quant import pack_int4, unpack_int4, unpack_quant_param

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


# The worked example of the operator reference, 15.4.
@IMPLEMENTATIONS
def test_dynamic_quant_worked_example(table):
    quantised, scale = table.npu_dynamic_quant(torch.tensor([[0.5, -1.0, 0.25, 0.0039]]))
    assert quantised.tolist() == [[64, -127, 32, 0]]
    torch.testing.assert_close(scale, torch.tensor([1 / 127]), atol=1e-9, rtol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("mode", ["pertoken", "perchannel", "pertensor"])
@pytest.mark.parametrize("dst_type", [None, torch.quint4x2])
def test_dynamic_quant_comes_back_within_half_a_step(table, mode, dst_type):
    torch.manual_seed(0)
    input = torch.randn(2, 3, 16).bfloat16()
    quantised, scale = table.npu_dynamic_quant(input, quant_mode=mode, dst_type=dst_type)
    steps = {"pertoken": scale.unsqueeze(-1), "perchannel": scale.unsqueeze(-2), "pertensor": scale}[mode]
    integers = unpack_int4(quantised) if dst_type == torch.quint4x2 else quantised
    error = (integers.float() * steps - input.float()).abs()
    assert (error <= steps * 0.5001).all()
    assert integers.abs().max() == (7 if dst_type == torch.quint4x2 else 127)


@IMPLEMENTATIONS
def test_dynamic_quant_smooths_first_and_survives_a_row_of_zeros(table):
    input = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    quantised, scale = table.npu_dynamic_quant(input, smooth_scales=torch.tensor([4.0, 1.0]))
    assert quantised.tolist() == [[127, 64], [0, 0]]
    torch.testing.assert_close(scale, torch.tensor([4 / 127, 0.0]), atol=1e-8, rtol=0)


@given(st.lists(st.integers(-8, 7), min_size=8, max_size=8))
@settings(max_examples=25, deadline=None)
def test_int4_packing_round_trip_lowest_bits_first(values):
    packed = pack_int4(torch.tensor([values]))
    assert packed.dtype == torch.int32
    assert packed.shape == (1, 1)
    assert (packed.item() & 0xF) == values[0] & 0xF
    assert unpack_int4(packed).tolist() == [values]


@IMPLEMENTATIONS
@pytest.mark.parametrize("depth", [16, 1500])
@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16])
def test_quant_matmul_is_exact_before_its_one_rounding(table, depth, output_dtype):
    torch.manual_seed(0)
    x1, x2 = int8(2, 3, depth), int8(depth, 5)
    scale, tokens = torch.rand(5) * 1e-4, torch.rand(3)
    total = torch.zeros(2, 3, 5, dtype=torch.float64)
    for k in range(depth):
        total += x1[..., k].double()[..., None] * x2[k].double()
    bias = torch.randn(5)
    expected = total * scale.double() * tokens.double()[:, None] + bias.double()
    out = table.npu_quant_matmul(x1, x2, scale, output_dtype=output_dtype, pertoken_scale=tokens, bias=bias)
    assert out.dtype == output_dtype
    tolerance = 1e-3 if output_dtype == torch.float16 else 8e-3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_quant_matmul_of_long_sums_does_not_lose_units():
    x1, x2 = torch.full((1, 4097), 127, dtype=torch.int8), torch.full((4097, 1), 127, dtype=torch.int8)
    out = ops.npu_quant_matmul(x1, x2, torch.tensor([1 / (127 * 127)]), output_dtype=torch.bfloat16)
    # 4097 rounds to 4096 in bfloat16; int8 output shows the unit once the rest is taken off by an integer bias.
    assert out.item() == 4096
    rest = torch.tensor([-4097 * 127 * 127 + 3], dtype=torch.int32)
    units = ops.npu_quant_matmul(x1, x2, torch.tensor([1.0]), bias=rest, output_dtype=torch.int8)
    assert units.item() == 3


@IMPLEMENTATIONS
def test_quant_matmul_int8_output_with_integer_bias_and_offset(table):
    x1, x2 = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3, 50], [4, 60]], dtype=torch.int8)
    bias = torch.tensor([2, 0], dtype=torch.int32)
    out = table.npu_quant_matmul(
        x1, x2, torch.tensor([0.5, 1.0]), bias=bias, offset=torch.tensor([1.0]), output_dtype=torch.int8
    )
    assert out.tolist() == [[8, 127]]
    assert out.dtype == torch.int8


def test_quant_matmul_needs_an_output_dtype():
    with pytest.raises(TypeError, match="output_dtype"):
        ops.npu_quant_matmul(int8(1, 8), int8(8, 4), torch.ones(4))


@IMPLEMENTATIONS
def test_w8a8_recipe_approximates_the_float_product(table):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 64).bfloat16(), torch.randn(64, 32)
    quantised, tokens = table.npu_dynamic_quant(x)
    columns = weight.abs().amax(0) / 127
    integers = torch.round(weight / columns).to(torch.int8)
    out = table.npu_quant_matmul(quantised, integers, columns, pertoken_scale=tokens, output_dtype=torch.bfloat16)
    torch.testing.assert_close(out.float(), x.float() @ weight, atol=0.3, rtol=0.02)


def test_packed_scale_keeps_19_bits_and_the_offset():
    scale = torch.tensor([0.123456789, -3.0, 1e-5])
    packed = ops.npu_trans_quant_param(scale, torch.tensor([-256.0, 255.0, -1.0]))
    assert packed.dtype == torch.int64
    assert ((packed >> 46) == 1).all()
    back, offset = unpack_quant_param(packed)
    assert offset.tolist() == [-256, 255, -1]
    torch.testing.assert_close(back, scale, atol=0, rtol=2**-10)
    assert not torch.equal(back, scale)
    assert ops.npu_trans_quant_param(torch.tensor([1.0])).item() == (1 << 46) | 0x3F800000


def test_quant_matmul_takes_packed_scales():
    torch.manual_seed(0)
    x1, x2, scale = int8(3, 16), int8(16, 4), torch.rand(4) * 0.01
    plain = ops.npu_quant_matmul(x1, x2, scale, output_dtype=torch.float16)
    packed = ops.npu_quant_matmul(x1, x2, ops.npu_trans_quant_param(scale), output_dtype=torch.float16)
    torch.testing.assert_close(packed, plain, atol=1e-2, rtol=2e-3)
    offset = ops.npu_quant_matmul(
        x1 * 0, x2, ops.npu_trans_quant_param(scale, torch.tensor([5.0])), output_dtype=torch.int8
    )
    assert (offset == 5).all()


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    form=st.sampled_from(["(1,)", "(N,)", "(1,N)", "groups"]),
    four_bits=st.booleans(),
    with_offset=st.booleans(),
    with_bias=st.booleans(),
)
def test_weight_quant_adds_the_offset_before_scaling(dtype, form, four_bits, with_offset, with_bias):
    torch.manual_seed(0)
    depth, columns, group = 80, 16, 32
    shape = {"(1,)": (1,), "(N,)": (columns,), "(1,N)": (1, columns), "groups": (3, columns)}[form]
    integers = torch.randint(-8, 8, (depth, columns)) if four_bits else int8(depth, columns)
    weight = pack_int4(integers) if four_bits else integers
    x = (torch.randn(5, depth) / 8).to(dtype)
    scale = (torch.rand(shape) * 0.01).to(dtype)
    offset = torch.randint(-4, 5, shape).to(dtype) if with_offset else None
    bias = torch.randn(columns).to(torch.float32 if dtype == torch.bfloat16 else dtype) if with_bias else None

    def full(parameter: torch.Tensor) -> torch.Tensor:
        parameter = parameter.double()
        return torch.stack([parameter[k // group] for k in range(depth)]) if form == "groups" else parameter

    dequantised = (integers.double() + (0 if offset is None else full(offset))) * full(scale)
    expected = x.double() @ dequantised + (0 if bias is None else bias.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for table in (ops, composed):
        out = table.npu_weight_quant_batchmatmul(
            x, weight, scale, offset, bias=bias, antiquant_group_size=group if form == "groups" else 0
        )
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@IMPLEMENTATIONS
def test_weight_quant_int8_output(table):
    out = table.npu_weight_quant_batchmatmul(
        torch.eye(2),
        torch.tensor([[10, 20], [30, -120]], dtype=torch.int8),
        torch.tensor([0.5]),
        quant_scale=torch.tensor([2.0]),
        quant_offset=torch.tensor([-20.0]),
    )
    assert out.dtype == torch.int8
    assert out.tolist() == [[-10, 0], [10, -128]]


X8, W8, S = torch.zeros(3, 64, dtype=torch.int8), torch.zeros(64, 8, dtype=torch.int8), torch.ones(8)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((X8.int(), W8, S), {}, "x1 is torch.int32 and x2 torch.int8; both must be int8"),
        ((X8, W8.t(), S), {}, "must be .*K, N"),
        ((X8, W8, S[:3]), {}, r"scale \(3,\) torch.float32 must be"),
        ((X8, W8, S.bfloat16()), {}, "a bfloat16 scale gives bfloat16 output only"),
        ((X8, W8, S.long()), {"pertoken_scale": torch.ones(3)}, "an int64 scale is for"),
        ((X8, W8, S), {"pertoken_scale": torch.ones(4)}, r"pertoken_scale \(4,\) torch.float32 must be \(3,\)"),
        ((X8, W8, S), {"pertoken_scale": torch.ones(3), "output_dtype": torch.int8}, "not int8"),
        ((X8, W8, S), {"offset": torch.ones(1)}, "offset .* int8 output only"),
        ((X8, W8, S), {"bias": torch.ones(8).half()}, "bias .* be one of"),
        ((X8, W8, S), {"output_dtype": None}, "output_dtype None must be"),
        ((X8, W8, S), {"output_dtype": torch.float32}, "output_dtype torch.float32 must be"),
    ],
)
def test_refusals_of_quant_matmul(table, arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        table.npu_quant_matmul(*arguments, **{"output_dtype": torch.float16, **keywords})


XF = torch.zeros(3, 64)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((torch.zeros(2, 3, 64), W8, S), {}, r"x \(2, 3, 64\) must be 2-D"),
        ((X8, W8, S), {}, "x is torch.int8; it must be floating-point"),
        ((XF, W8.t(), S), {}, "weight .* must be int8"),
        ((XF, W8, S[:4]), {}, r"antiquant_scale \(4,\)"),
        ((XF, W8, S.half()), {}, "antiquant_scale .* must be torch.float32"),
        ((XF, W8, S, S[:2]), {}, r"antiquant_offset \(2,\)"),
        ((XF, W8, S), {"antiquant_group_size": 48}, "antiquant_group_size 48 must be a multiple of 32 from 32 to"),
        ((XF, W8, S), {"antiquant_group_size": 64}, "antiquant_group_size 64"),
        ((XF.bfloat16(), W8, S.bfloat16()), {"bias": S.bfloat16()}, "bias .* torch.float32 for a torch.bfloat16 x"),
        ((XF, W8, S), {"quant_offset": S}, "quant_offset needs quant_scale"),
    ],
)
def test_refusals_of_weight_quant(table, arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        table.npu_weight_quant_batchmatmul(*arguments, **keywords)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("input", "keywords", "message"),
    [
        (torch.zeros(8), {}, "at least 2 dimensions"),
        (torch.zeros(2, 8, dtype=torch.int8), {}, "must be floating-point"),
        (torch.zeros(2, 8), {"quant_mode": "perrow"}, "choose from pertoken, perchannel, pertensor"),
        (torch.zeros(2, 8), {"dst_type": torch.int32}, "choose torch.int8 or torch.quint4x2"),
        (torch.zeros(2, 12), {"dst_type": torch.quint4x2}, "12 must be a multiple of 8"),
        (torch.zeros(2, 8), {"smooth_scales": torch.ones(2)}, r"smooth_scales \(2,\) must be"),
    ],
)
def test_refusals_of_dynamic_quant(table, input, keywords, message):
    with pytest.raises(ValueError, match=message):
        table.npu_dynamic_quant(input, **keywords)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((S.half(),), "must be float32"),
        ((S, torch.ones(3)), r"offset \(3,\)"),
        ((S, None, 1), "round_mode 1 is not supported"),
    ],
)
def test_refusals_of_trans_quant_param(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.npu_trans_quant_param(*arguments)
