"""The C++ kernels against float64, inside the model, and what is said when they can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCABULARY, padded_batch, save, stock_model, tiny_config, tuned_model

from npu_tuned_model import TuningOptions, cpu_kernels, ops
from npu_tuned_model.cpu_decode import CpuDecode, why_no_cpu_decode
from npu_tuned_model.linear import PACKING_ROWS, PackedLinear
from npu_tuned_model.ops.portable_attention import causal_prefill, windowed_decode

HAS_THE_INSTRUCTIONS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
needs_the_instructions = pytest.mark.skipif(not HAS_THE_INSTRUCTIONS, reason="this CPU has no AVX512-BF16")
BF16_ROUNDING = 2.0**-8


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    if HAS_THE_INSTRUCTIONS and "reason" not in request.node.name:
        assert cpu_kernels.why_not() is None


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def packed_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
    return packed, cpu_kernels.blocks_of(packed, weight)


@needs_the_instructions
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    out_features=st.sampled_from([1, 16, 63, 64, 65, 200, 320, 1152]),
    pairs=st.sampled_from([32, 48, 448]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear_rounds_once(tokens, out_features, pairs, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, 2 * pairs, generator=generator).bfloat16()
    rows = torch.randn(tokens, 2 * pairs, generator=generator).bfloat16()
    bias = torch.randn(out_features if with_bias else 0, generator=generator).bfloat16()
    packed, blocks = packed_blocks(weight)
    if blocks is None:  # oneDNN leaves narrow weights alone
        assert out_features < 64
        return
    result = cpu_kernels.few_rows_linear(rows, blocks, bias, out_features).double()
    expected = rows.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    size = rows.double().abs() @ weight.double().abs().t() + 1
    assert ((result - expected).abs() <= BF16_ROUNDING * expected.abs() + 1e-6 * size).all()
    del packed


@needs_the_instructions
def test_a_layout_that_is_not_the_weights_is_refused():
    weight = torch.randn(128, 64).bfloat16()
    packed, blocks = packed_blocks(weight)
    assert blocks is not None
    other = weight.clone()
    other[127, 63] += 1
    assert cpu_kernels.blocks_of(packed, other) is None


@needs_the_instructions
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 3, 7, 9, 20]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    window=st.sampled_from([1, 16, 65, 320]),
    scale=st.sampled_from([0.125, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_attention_is_as_exact_as_its_inputs(batch, kv_heads, group, head_dim, window, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 1, kv_heads * group, head_dim, generator=generator).bfloat16()
    caches = torch.randn(2, batch, window + 5, kv_heads, head_dim, generator=generator).bfloat16()
    lengths = torch.randint(0, window + 1, (batch,), generator=generator)
    for row, length in enumerate(lengths):
        caches[:, row, length:] = float("nan")  # nobody may look behind the length
    key, value = caches[0, :, :window], caches[1, :, :window]
    result = decode_attention(query, key, value, lengths, scale)
    clean = caches.nan_to_num()[:, :, :window].double()
    expected = windowed_decode(query.double(), clean[0], clean[1], lengths, scale=scale)
    assert ((result.double() - expected).abs() <= BF16_ROUNDING * expected.abs() + 1e-5).all()


@needs_the_instructions
@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 2),
    length=st.sampled_from([1, 3, 64, 65, 130, 200]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    scale=st.sampled_from([0.125, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_prompt_attention(batch, length, kv_heads, group, head_dim, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    # one tensor, as the fused projection makes it: rows of a head are contiguous, tokens are not
    merged = torch.randn(batch, length, heads + 2 * kv_heads, head_dim, generator=generator).bfloat16()
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=2)
    result = prompt_attention(query, key, value, scale)
    wide = [part.double() for part in (query, key, value)]
    expected = causal_prefill(*wide, scale=scale)
    largest = wide[2].abs().cummax(dim=1).values.repeat_interleave(group, dim=2)  # what a rounded probability may move
    assert ((result.double() - expected).abs() <= BF16_ROUNDING * (expected.abs() + largest)).all()


def prompt_attention(query, key, value, scale, **changes):
    arguments = {"input_layout": "BSND", "num_heads": query.shape[2], "num_key_value_heads": key.shape[2]}
    arguments.update({"atten_mask": ops.compressed_causal_mask(torch.device("cpu")), "sparse_mode": 3, **changes})
    return cpu_kernels.prompt_flash_attention(query, key, value, scale_value=scale, **arguments)


@needs_the_instructions
def test_a_prompt_that_is_not_causal_goes_to_the_portable_operator():
    query, key, value = torch.randn(3, 1, 5, 2, 32).bfloat16()
    full = prompt_attention(query, key, value, 1.0, atten_mask=None, sparse_mode=0, next_tokens=2147483647)
    scores = torch.einsum("bqnd,bknd->bnqk", query.double(), key.double()).softmax(-1)
    expected = torch.einsum("bnqk,bknd->bqnd", scores, value.double())
    torch.testing.assert_close(full.double(), expected, rtol=0.02, atol=0.02)


def decode_attention(query, key, value, lengths, scale, **more):
    arguments = {"input_layout": "BSND", "num_heads": query.shape[2], "num_key_value_heads": key.shape[2], **more}
    return cpu_kernels.incre_flash_attention(
        query, key, value, actual_seq_lengths=lengths, scale_value=scale, **arguments
    )


@needs_the_instructions
def test_threads_share_the_slots_of_one_head(threads):
    query, cache = torch.randn(1, 1, 3, 64).bfloat16(), torch.randn(2, 1, 400, 1, 64).bfloat16()
    for length in (1, 2, 399):
        lengths = torch.tensor([length])
        threads(1)
        alone = decode_attention(query, cache[0], cache[1], lengths, 0.125)
        threads(4)
        shared = decode_attention(query, cache[0], cache[1], lengths, 0.125)
        # the parts' sums are added in another order, so a result may be rounded to its neighbour
        torch.testing.assert_close(shared, alone, rtol=2 * BF16_ROUNDING, atol=1e-5)


@needs_the_instructions
def test_a_call_with_a_mask_goes_to_the_portable_operator():
    query, cache = torch.randn(1, 1, 2, 32).bfloat16(), torch.randn(2, 1, 8, 1, 32).bfloat16()
    mask = torch.tensor([False] * 3 + [True] * 5)[None, None, None]
    masked = decode_attention(query, cache[0], cache[1], None, 1.0, atten_mask=mask)
    short = decode_attention(query, cache[0], cache[1], torch.tensor([3]), 1.0)
    torch.testing.assert_close(masked, short, rtol=2 * BF16_ROUNDING, atol=1e-2)


@needs_the_instructions
def test_few_rows_and_many_rows_share_one_weight():
    weight, bias = torch.randn(256, 64).bfloat16(), torch.randn(256).bfloat16()
    linear = PackedLinear(weight, bias, [192, 64], kernels=True)
    assert linear.few_rows_kernel
    rows = torch.randn(cpu_kernels.FEW_ROWS + 1, 64).bfloat16()
    few, many = linear(rows[: cpu_kernels.FEW_ROWS]), linear(rows)
    torch.testing.assert_close(few, many[: cpu_kernels.FEW_ROWS], rtol=2 * BF16_ROUNDING, atol=1e-3)
    assert linear.blocks0.data_ptr() == torch.ops.mkldnn.data_ptr(linear.pieces[0])


@needs_the_instructions
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_model_decodes_as_without_them(checkpoints, compiled):
    folder = checkpoints["gqa_14_2_head_64"][1]
    prompt = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = {}
    for native in (True, False):
        model = tuned_model(folder, TuningOptions(native_kernels=native), dtype="bfloat16")
        assert (model.why_no_native_kernels() is None) == native
        if compiled and native:
            model.run_graph()
        cache = model.new_cache(2, 16)
        steps = [model(prompt, past_key_values=cache).logits[:, -1]]
        steps += [model(prompt[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(4)]
        logits[native] = torch.stack(steps)
        assert not (compiled and native) or model.steps.graphs == {"prefill": 1, "decode": 1}
    assert not torch.equal(logits[True], logits[False])  # else it would be the same path twice
    torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=0.05)


@pytest.fixture(scope="module", params=["gqa_14_2_head_64", "gqa_28_4_head_128", "mha_4_head_64"])
def served_model(request, tmp_path_factory):
    """A bfloat16 model that the whole C++ step serves, tied and untied by shape."""
    config = tiny_config(request.param)
    config.intermediate_size = 192
    return tuned_model(save(stock_model(config), tmp_path_factory.mktemp("served")), dtype="bfloat16")


@needs_the_instructions
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=cpu_kernels.FEW_ROWS), seed=st.integers(0, 99))
def test_whole_step_is_the_networks_decode(served_model, lengths, seed):
    assert why_no_cpu_decode(served_model) is None
    decode = CpuDecode(served_model)
    ids, mask = padded_batch(lengths, seed)
    caches = [served_model.new_cache(len(lengths), max(lengths) + 4) for _ in range(2)]
    for cache in caches:
        served_model(ids, attention_mask=mask, past_key_values=cache)
    for token in ids[:, :3].split(1, dim=1):
        network = served_model.decode(token, caches[0].positions, caches[0].decode_window(), caches[0])
        call, most_likely = decode(token, caches[1])
        assert torch.equal(most_likely, call.argmax(dim=-1))
        torch.testing.assert_close(call, network, rtol=0, atol=0.1)  # logits of a few units, in steps of 2^-6
        for cache in caches:
            cache.advance()
    for ours, theirs in zip(caches[1].keys + caches[1].values, caches[0].keys + caches[0].values):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@needs_the_instructions
def test_whole_step_takes_no_more_rows_than_it_is_good_for(served_model):
    decode, rows = CpuDecode(served_model), cpu_kernels.FEW_ROWS
    for batch in (rows, rows + 1):
        assert decode.serves(torch.zeros(batch, 1), served_model.new_cache(batch, 8)) == (batch == rows)


@needs_the_instructions
def test_compiled_steps_decode_without_a_graph(served_model):
    served_model.run_graph()
    try:
        served_model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert served_model.steps.graphs == {"prefill": 1}
    finally:
        served_model.run_eager()


@needs_the_instructions
def test_a_position_outside_the_cache_is_refused(served_model):
    cache = served_model.new_cache(1, 8)
    cache.start([4096])
    with pytest.raises(RuntimeError, match="position 4096 is outside"):
        CpuDecode(served_model)(torch.ones(1, 1, dtype=torch.int64), cache)


@needs_the_instructions
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused(served_model, token):
    with pytest.raises(IndexError, match=f"token {token} is not in the vocabulary"):
        CpuDecode(served_model)(torch.tensor([[1], [token]]), served_model.new_cache(2, 8))


@needs_the_instructions
@pytest.mark.parametrize("workers", [1, 2, 3, 30])
def test_the_most_likely_token_is_torchs_argmax(served_model, threads, workers):
    """Of equal ones the first, of those that aren't numbers the first, however the work is shared."""
    generator = torch.Generator().manual_seed(workers)
    decode, batch = CpuDecode(served_model), 3
    table = torch.randn(20, served_model.config.hidden_size, generator=generator).bfloat16()
    threads(workers)
    for nans in (0, 0, 0, 2, 2, VOCABULARY):
        decode.head = table[torch.randint(20, (VOCABULARY,), generator=generator)]
        decode.head[torch.randint(VOCABULARY, (nans,), generator=generator)] = float("nan")
        token = torch.randint(VOCABULARY, (batch, 1), generator=generator)
        logits, most_likely = decode(token, served_model.new_cache(batch, 8))
        assert torch.equal(most_likely, logits.argmax(dim=-1))
        assert logits.isnan().any() == (nans > 0)


@needs_the_instructions
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_greedy_search_goes_by_logits_that_a_hook_has_changed(served_model, in_place, inference):
    def only_seven(module, given, output):
        wanted = torch.nn.functional.one_hot(torch.tensor(7), VOCABULARY) * 1e6
        if in_place:
            output.logits.add_(wanted)
        else:
            output.logits = output.logits + wanted

    ids = torch.arange(3, 9)[None]
    arguments = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    served_model.run_graph()
    handle = served_model.register_forward_hook(only_seven)
    try:
        with torch.inference_mode(inference):
            assert served_model.generate(ids, **arguments)[0, 6:].tolist() == [7] * 4
        handle.remove()
        assert served_model.generate(ids, **arguments)[0, 6:].tolist() != [7] * 4
    finally:
        handle.remove()
        served_model.run_eager()


def test_reason_why_a_step_is_not_one_call(checkpoints):
    options = TuningOptions(fused_qkv=False, native_kernels=False)
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1], options)
    assert why_no_cpu_decode(model) == "needs fused_qkv, native_kernels"
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    assert why_no_cpu_decode(model) == "needs packed weights, whole on this rank"


@pytest.fixture
def asked_afresh():
    """why_not() answers once per process: forget the answer before the test and after it."""
    loaded = cpu_kernels._loaded
    cpu_kernels.why_not.cache_clear()
    yield
    cpu_kernels.why_not.cache_clear()
    cpu_kernels._loaded = loaded


@needs_the_instructions
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "no-such-compiler was not found: install g++"), ("false", "could not be built")],
)
def test_reason_without_a_compiler_that_works(asked_afresh, monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert reason in cpu_kernels.why_not()
    assert not list(tmp_path.rglob("*.so"))


def test_reason_on_another_cpu(asked_afresh, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : fpu sse2 avx2")
    assert cpu_kernels.why_not() == "needs a CPU with AVX512-BF16"


def test_reason_of_a_float32_model(checkpoints):
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1], TuningOptions())
    assert model.why_no_native_kernels() == "for bfloat16 on a CPU only"
