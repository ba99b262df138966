"""int8 weights: how they are rounded, the same on any number of ranks, and what the model computes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import edit_json
from hypothesis import given, settings
from hypothesis import strategies as st
from models import padded_batch, save, stock_logits, stock_model, tiny_config, tuned_logits
from peft import LoraConfig, get_peft_model

from npu_tuned_model import TuningOptions, UserError, cpu_int8, cpu_kernels, load_model
from npu_tuned_model.checkpoint_convert import Conversion
from npu_tuned_model.checkpoint_layout import Quantised
from npu_tuned_model.cpu_decode import CpuDecode, why_no_cpu_decode
from npu_tuned_model.linear_int8 import InputMajorInt8Linear, Int8Linear, PackedInt8Linear
from npu_tuned_model.ops.quant import widening_matmul
from npu_tuned_model.quantise import quantise_rows
from npu_tuned_model.tensor_parallel import TensorParallel
from npu_tuned_model.work import work_of

needs_the_instructions = pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AVX512-BF16"
)
BF16_ROUNDING = 2.0**-8
PLAIN = TuningOptions().replace(packed_weights=False, native_kernels=False)
IDS, MASK = padded_batch([9, 4, 13])
NEW = torch.randint(2, 320, (3, 3), generator=torch.Generator().manual_seed(1))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 40),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_rounding_is_to_the_nearest_and_symmetric(rows, columns, size, dtype, seed):
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    weight[0] = 0
    integers, scale = quantise_rows(weight)
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    assert integers.abs().max() <= 127
    assert scale[0] == 1
    # the scale is rounded, by 2^-9 at most, so the largest may lie a quarter of a step beyond the last one
    error = (integers * scale.double()[:, None] - weight.double()).abs()
    assert (error <= 0.5 * scale.double()[:, None] * (1 + 1e-6)).all()
    negated, _ = quantise_rows(-weight)
    assert torch.equal(negated, -integers)


def int8_linear(out_features: int, in_features: int, *, bias: bool, seed: int = 0) -> Int8Linear:
    """Random, of a bfloat16 model."""
    generator = torch.Generator().manual_seed(seed)
    linear = Int8Linear(in_features, out_features, bias=bias)
    integers, scale = quantise_rows(torch.randn(out_features, in_features, generator=generator))
    linear.weight.data.copy_(integers)
    linear.weight_scale.data.copy_(scale)
    if bias:
        linear.bias = torch.nn.Parameter(torch.randn(out_features, generator=generator).bfloat16(), requires_grad=False)
    return linear


@needs_the_instructions
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 11),
    out_features=st.sampled_from([1, 16, 63, 64, 65, 200, 320]),
    in_features=st.sampled_from([4, 64, 128, 132, 896, 4864]),
    bias=st.booleans(),
    spread=st.sampled_from([0.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_kernel_rounds_once(tokens, out_features, in_features, bias, spread, seed):
    """As exact as the bfloat16 of its result, also where some inputs are a thousand times the others."""
    assert cpu_kernels.why_not() is None
    linear = int8_linear(out_features, in_features, bias=bias, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, in_features, generator=generator)
    rows = (rows * torch.exp(spread * torch.randn(rows.shape, generator=generator))).bfloat16()
    weight = linear.weight.double() * linear.weight_scale.double()[:, None]
    expected = rows.double() @ weight.t() + (linear.bias.double() if bias else 0)
    blocks, scales = cpu_int8.pack(linear.weight.detach(), linear.weight_scale.detach())
    shift = linear.bias.detach() if bias else torch.empty(0, dtype=torch.bfloat16)
    kernel = torch.ops.npu_tuned_model.few_rows_int8_linear.default
    result = kernel(rows, blocks, scales, shift, out_features).double()
    # an input may be off by 2^-14 of the largest of its 128
    largest = torch.nn.functional.pad(rows.double().abs(), (0, -in_features % 128)).unflatten(1, (-1, 128)).amax(2)
    inputs = largest.repeat_interleave(128, 1)[:, :in_features] * 2.0**-14
    room = BF16_ROUNDING * expected.abs() + inputs @ weight.abs().t() + 1e-6
    assert ((result - expected).abs() <= room).all()


@needs_the_instructions
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_kernel_hands_on_what_is_not_finite(odd):
    packed = PackedInt8Linear(int8_linear(128, 256, bias=False), [128])
    rows = torch.randn(2, 256).bfloat16()
    rows[0, 200] = odd
    result = packed(rows)
    assert not result[0].isfinite().any()
    assert result[1].isfinite().all()


@needs_the_instructions
@pytest.mark.parametrize("sizes", [[320], [200, 60, 60]])
def test_a_prompt_gets_what_few_rows_get(sizes, monkeypatch):
    monkeypatch.setattr(cpu_int8, "TILE_ELEMENTS", 128 * 256)
    linear = int8_linear(320, 256, bias=True)
    rows = torch.randn(40, 256).bfloat16()
    expected = linear(rows)
    dense = linear.dense_weight()
    packed = PackedInt8Linear(linear, sizes)
    many, few = packed(rows), torch.cat([packed(part) for part in rows.split(cpu_kernels.FEW_ROWS)])
    for result in (many, few):
        torch.testing.assert_close(result, expected, rtol=2 * BF16_ROUNDING, atol=0.3)  # sums of 256 rounded weights
    assert torch.equal(packed.dense_weight(), dense)


@needs_the_instructions
def test_packing_takes_the_memory_of_the_weight():
    linear = int8_linear(192, 64, bias=False)
    place = linear.weight.data_ptr()
    assert PackedInt8Linear(linear, [192]).blocks0.data_ptr() == place


def test_an_npus_pieces_make_up_the_weight(monkeypatch):
    monkeypatch.setattr("npu_tuned_model.linear_int8.MOST_FEATURES", 100)
    linear = int8_linear(250, 64, bias=True)
    pieces = InputMajorInt8Linear(linear, [250])
    assert pieces.sizes == [83, 83, 84]
    rows = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(pieces(rows), linear(rows), rtol=2 * BF16_ROUNDING, atol=0.1)
    assert torch.equal(pieces.dense_weight(), linear.dense_weight())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_matmul(dtype, compiled):
    """On the CPU, which has better ones."""
    linear = int8_linear(96, 64, bias=False)
    rows = torch.randn(5, 64).to(dtype)
    multiply = torch.compile(widening_matmul) if compiled else widening_matmul
    found = multiply(rows, linear.weight.detach().t(), linear.weight_scale.detach().to(dtype), None)
    expected = rows.double() @ (linear.weight.double() * linear.weight_scale.double()[:, None]).t()
    exact = dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 if exact else 0.15)


def expanded(stock, *, embeddings: bool):
    """The stock model with the weights that int8 ones stand for, in place."""
    for name, parameter in stock.named_parameters():
        vocabulary = name.startswith(("model.embed_tokens", "lm_head"))
        if parameter.dim() == 2 and (embeddings or not vocabulary):
            integers, scale = quantise_rows(parameter.detach())
            parameter.data = integers * scale.float()[:, None]
    return stock


@pytest.mark.parametrize("options", [TuningOptions(), TuningOptions.none()], ids=["all", "none"])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("shape", ["gqa_14_2_head_64", "gqa_4_2_head_16"])
def test_logits_are_those_of_the_weights_they_stand_for(checkpoints, shape, embeddings, options):
    folder = checkpoints[shape][1]
    stock = expanded(stock_model(tiny_config(shape)), embeddings=embeddings)
    model = load_model(
        folder, device="cpu", dtype="float32", options=options, weight_dtype="int8", int8_embeddings=embeddings
    )
    found = tuned_logits(model, IDS, MASK, NEW)
    torch.testing.assert_close(found, stock_logits(stock, IDS, MASK, NEW), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=["gqa_14_2_head_64", "mha_4_head_64"])
def served(request, tmp_path_factory) -> Path:
    """A tied and an untied checkpoint that the C++ decode step serves."""
    config = tiny_config(request.param)
    config.intermediate_size = 192
    return save(stock_model(config), tmp_path_factory.mktemp("served"))


@needs_the_instructions
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("lengths", [[7], [3, 60, 9, 1, 33]])
def test_whole_step_is_the_networks_decode(served, embeddings, lengths):
    model = load_model(served, device="cpu", dtype="bfloat16", weight_dtype="int8", int8_embeddings=embeddings)
    portable = load_model(
        served, device="cpu", dtype="bfloat16", options=PLAIN, weight_dtype="int8", int8_embeddings=embeddings
    )
    assert why_no_cpu_decode(model) is None
    assert model.why_no_native_kernels() is None
    ids, mask = padded_batch(lengths)
    caches = [each.new_cache(len(lengths), max(lengths) + 4) for each in (model, portable, model)]
    for each, cache in zip((model, portable, model), caches):
        each(ids, attention_mask=mask, past_key_values=cache)
    for token in ids[:, :3].split(1, dim=1):
        network, other = (
            each.decode(token, cache.positions, cache.decode_window(), cache)
            for each, cache in zip((model, portable), caches)
        )
        call, most_likely = CpuDecode(model)(token, caches[2])
        assert torch.equal(most_likely, call.argmax(dim=-1))
        torch.testing.assert_close(call, network, rtol=0, atol=0.1)
        torch.testing.assert_close(call, other, rtol=0, atol=0.15)
        for cache in caches:
            cache.advance()


def int8_tensors(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if value.dtype == torch.int8}


def scales(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if name.endswith("weight_scale")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gqa_14_2_head_64", "gqa_4_2_head_16"])
def test_any_number_of_ranks_hold_the_same_integers(checkpoints, tmp_path, shape, dtype):
    folder = checkpoints[shape][1]
    arguments = {"device": "cpu", "dtype": dtype, "options": PLAIN}
    whole = load_model(folder, weight_dtype="int8", **arguments)
    Conversion(folder, tmp_path / "1", quantised=Quantised(True, True), max_shard_bytes=10**5).write()
    alone = load_model(tmp_path / "1", **arguments)
    assert all(torch.equal(value, int8_tensors(alone)[name]) for name, value in int8_tensors(whole).items())
    assert all(torch.equal(value, scales(alone)[name]) for name, value in scales(whole).items())

    Conversion(folder, tmp_path / "2", tp_size=2, quantised=Quantised(True, True), max_shard_bytes=10**5).write()
    ranks = []
    for rank in range(2):
        parallel = TensorParallel(rank, 2, lambda tensor: tensor)
        plain = load_model(folder, weight_dtype="int8", parallel=parallel, **arguments)
        converted = load_model(tmp_path / "2", parallel=parallel, **arguments)
        for find in (int8_tensors, scales):
            found = find(converted)
            assert found
            assert all(torch.equal(value, found[name]) for name, value in find(plain).items())
        ranks.append({**int8_tensors(plain), **scales(plain)})
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer = whole.model.layers[1].get_submodule(name)
        place = f"model.layers.1.{name}.linear"
        assert torch.equal(torch.cat([rank[f"{place}.weight"] for rank in ranks], dim=1), layer.weight)
        assert all(torch.equal(rank[f"{place}.weight_scale"], layer.weight_scale) for rank in ranks)
    table = torch.cat([rank["model.embed_tokens.weight"] for rank in ranks])
    assert torch.equal(table, whole.model.embed_tokens.weight)


@needs_the_instructions
def test_a_rank_looks_up_its_rows_in_the_shared_output_layer(checkpoints):
    folder = checkpoints["gqa_14_2_head_64"][1]
    tokens, rows = torch.arange(0, 320, 7), []
    for rank in range(2):
        parallel = TensorParallel(rank, 2, lambda tensor: tensor)
        model = load_model(folder, device="cpu", dtype="bfloat16", weight_dtype="int8", parallel=parallel)
        rows.append(model.model.embed_tokens(tokens))
    whole = load_model(folder, device="cpu", dtype="bfloat16", weight_dtype="int8", options=PLAIN)
    assert torch.equal(rows[0] + rows[1], whole.model.embed_tokens(tokens))


def test_an_adapter_is_merged_before_rounding(checkpoints, tmp_path):
    torch.manual_seed(3)
    stock = stock_model(tiny_config())
    targets = ["q_proj", "o_proj", "down_proj"]
    adapter = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets)
    get_peft_model(stock, adapter).save_pretrained(tmp_path)
    arguments = {"device": "cpu", "dtype": "float32", "options": PLAIN, "lora": tmp_path}
    folder = checkpoints["gqa_4_2_head_16"][1]
    merged, model = load_model(folder, **arguments), load_model(folder, weight_dtype="int8", **arguments)
    for name in ("self_attn.qkv", "self_attn.o_proj", "mlp.down_proj"):
        integers, scale = quantise_rows(merged.model.layers[0].get_submodule(name).weight)
        layer = model.model.layers[0].get_submodule(name)
        assert (layer.weight.int() - integers.int()).abs().max() <= 1  # B A is summed in chunks, in another order
        torch.testing.assert_close(layer.weight_scale, scale.float(), rtol=2**-7, atol=0)
    part = TensorParallel(1, 2, lambda tensor: tensor)
    rank = load_model(folder, weight_dtype="int8", parallel=part, **arguments)
    down = model.model.layers[0].mlp.down_proj
    assert torch.equal(rank.model.layers[0].mlp.down_proj.linear.weight_scale, down.weight_scale)


def test_saved_are_the_weights_they_stand_for(checkpoints, tmp_path):
    folder = checkpoints["gqa_14_2_head_64"][1]
    model = load_model(folder, device="cpu", dtype="bfloat16", weight_dtype="int8")
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, device="cpu", dtype="bfloat16", options=PLAIN)
    kept = load_model(folder, device="cpu", dtype="bfloat16", weight_dtype="int8", options=PLAIN)
    for name in ("model.layers.1.self_attn.qkv", "model.embed_tokens"):
        assert torch.equal(again.get_submodule(name).weight, kept.get_submodule(name).dense_weight())


@pytest.mark.parametrize("shape", ["gqa_14_2_head_64", "gqa_4_2_head_16"])
def test_bytes_are_those_that_the_report_counts(checkpoints, shape):
    folder = checkpoints[shape][1]
    model = load_model(folder, device="cpu", dtype="bfloat16", options=PLAIN, weight_dtype="int8")
    work = work_of(model.config, dtype=torch.bfloat16, batch=1, length=8, quantised=Quantised(True, True))
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    assert work.weight_bytes == sum(held.values())


def test_unknown_weight_dtypes_are_refused(checkpoints):
    with pytest.raises(UserError, match="weight_dtype is 'int4'; it can be 'int8', or None"):
        load_model(checkpoints["gqa_4_2_head_16"][1], device="cpu", weight_dtype="int4")


def test_a_tied_output_layer_must_be_the_embedding(tmp_path):
    stock = stock_model(tiny_config("gqa_4_2_head_16"))
    save(stock, tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"differ although config\.json sets tie_word_embeddings"):
        load_model(tmp_path, device="cpu", weight_dtype="int8")
