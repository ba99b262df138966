"""plan: the memory it foretells is what small models take, its times are those of the arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SHAPES, padded_batch, save, stock_model, tiny_config

from npu_tuned_model import UserError, load_model
from npu_tuned_model.plan import DEVICES, RESERVE_BYTES, Device, Plan, load_config, main
from npu_tuned_model.tensor_parallel import TensorParallel

CARD = Device(memory_bytes=10**9 + RESERVE_BYTES, bandwidth=1e9, flops=1e12, link_to_each=1e9, link_total=2e9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_fullest_rank_holds(tmp_path: Path, shape: str, size: int, dtype: str) -> None:
    config = tiny_config(shape)
    config.vocab_size += 1
    folder = save(stock_model(config), tmp_path / "model")
    plan = Plan(config, size, getattr(torch, dtype), CARD)
    held = []
    for rank in range(size):
        parallel = TensorParallel(rank, size) if size > 1 else None
        model = load_model(folder, device="cpu", dtype=dtype, parallel=parallel)
        biases = [value for name, value in model.named_buffers() if "bias" in name]
        held.append(sum(weight.nbytes for weight in [*model.parameters(), *biases]))
        rotary = sum(buffer.nbytes for buffer in model.model.rotary.buffers())
    memory = plan.memory(3, 50, 20)
    assert memory.weights == max(held)
    assert memory.tables == rotary + model.new_cache(1, 8).causal_mask.nbytes


@pytest.mark.parametrize(
    ("batch", "prompt", "new_tokens"), [(1, 1, 1), (3, 50, 77), (2, 128, 127), (2, 129, 127), (1, 400, 300)]
)
def test_the_kv_cache_is_what_a_compiled_model_allocates(
    checkpoints: dict[str, tuple[object, Path]], batch: int, prompt: int, new_tokens: int
) -> None:
    model = load_model(checkpoints["gqa_12_2_head_128"][1], device="cpu", dtype="float32")
    model.run_graph()
    cache = model.new_cache(batch, prompt + new_tokens)
    plan = Plan(model.config, 1, torch.float32, CARD)
    expected = sum(tensor.nbytes for tensor in [*cache.keys, *cache.values])
    assert plan.memory(batch, prompt, new_tokens).kv_cache == expected


def peak_of_prefill(folder: Path, length: int) -> int:
    """Bytes that prefill allocates at most, beside the model and its cache."""
    model = load_model(folder, device="cpu", dtype="float32")
    ids, _ = padded_batch([length, length])
    cache = model.new_cache(2, length)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        model(ids, past_key_values=cache)
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_activations_are_about_what_prefill_takes(tmp_path: Path) -> None:
    """The portable feed-forward needs one product more than an NPU's operator, and its attention is not in the plan."""
    config = tiny_config("gqa_4_2_head_16")
    config.intermediate_size = 1024
    folder = save(stock_model(config), tmp_path / "model")
    planned = Plan(config, 1, torch.float32, CARD).memory(2, 500, 1).activations
    assert planned <= peak_of_prefill(folder, 500) <= 1.4 * planned


@given(
    batch=st.integers(1, 50),
    prompt=st.integers(1, 500),
    new_tokens=st.integers(1, 100),
    memory=st.integers(10**6, 10**9),
)
@settings(max_examples=25, deadline=None)
def test_the_largest_batch_and_prompt_are_those_that_just_fit(
    batch: int, prompt: int, new_tokens: int, memory: int
) -> None:
    config = tiny_config("gqa_12_2_head_128")
    plan = Plan(config, 2, torch.bfloat16, Device(memory + RESERVE_BYTES, 1, 1, 1, 1))
    most = plan.largest_batch(prompt, new_tokens)
    assert most == 0 or plan.fits(most, prompt, new_tokens)
    assert not plan.fits(most + 1, prompt, new_tokens)
    longest = plan.largest_prompt(batch, new_tokens)
    assert longest == 0 or plan.fits(batch, longest, new_tokens)
    assert longest == config.max_position_embeddings - new_tokens or not plan.fits(batch, longest + 1, new_tokens)


def test_times_are_bytes_over_bandwidth_and_operations_over_peak() -> None:
    config = config_of(heads=4, kv_heads=2, head_dim=4, layers=1)  # hidden 16, feed-forward 24, vocabulary 40
    plan = Plan(config, 1, torch.bfloat16, CARD)
    layer = 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 24
    weights = layer + (16 + 2 * 8) + 2 * 16 + 16 + 40 * 16  # matrices, biases, norms, output layer
    kv = 3 * (10 + 3.5) * 2 * 8  # three rows, on average 10 + (8 - 1) / 2 tokens, key and value of 8
    assert plan.decode(3, 10, 8).total_ms == pytest.approx((weights + kv) * 2 / 1e9 * 1000)
    fast_memory = Plan(config, 1, torch.bfloat16, Device(1, 1e30, 1e12, 1, 1))
    attention = 4 * 16 * (10 * 11 // 2)
    assert fast_memory.prefill(3, 10).total_ms == pytest.approx(
        3 * (2 * 10 * layer + attention + 2 * 640) / 1e12 * 1000
    )


def test_sums_over_the_ranks_take_the_links_time() -> None:
    config = config_of(heads=4, kv_heads=2, head_dim=4, layers=3)
    # of 4 ranks each sends 2 * 3/4 of the bytes; 3 links of 1 GB/s, of which 2 GB/s can be used
    each = 2 * 3 / 4 / 2e9
    bound = Plan(config, 4, torch.bfloat16, CARD).decode(5, 10, 8)
    assert bound.sums_ms == pytest.approx(((1 + 2 * 3) * 5 * 16 * 2 + 5 * 40 * 2) * each * 1000)
    assert Plan(config, 1, torch.bfloat16, CARD).decode(5, 10, 8).sums_ms == 0


def test_the_published_shapes_have_the_published_sizes() -> None:
    billions = {"qwen2-0.5b": 0.494, "qwen2-1.5b": 1.544, "qwen2-7b": 7.616, "qwen2-72b": 72.706}
    for name, expected in billions.items():
        weights = Plan(load_config(name), 1, torch.bfloat16, CARD).memory(1, 1, 1).weights
        assert weights / 2 / 1e9 == pytest.approx(expected, abs=0.0006), name


def test_the_command_answers_for_the_published_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config=qwen2-72b", "--tp_size=8", "--batch_size=4"]) == 0
    out = capsys.readouterr().out
    assert "qwen2-72b on 8 x atlas-800i-a2-64g, bfloat16, batch 4" in out
    assert "it fits" in out
    assert "batch   4 prefill" in out
    assert "676" in out
    assert main(["--config=qwen2-72b", "--tp_size=2"]) == 1
    assert "IT DOES NOT FIT" in capsys.readouterr().out
    # other lengths than the published ones have no published times
    assert main(["--config=qwen2-7b", "--batch_size=4", "--max_new_tokens=5"]) == 0
    assert "345" not in capsys.readouterr().out


def test_a_bound_is_below_what_was_measured() -> None:
    for name, size in (("qwen2-7b", 1), ("qwen2-72b", 8)):
        plan = Plan(load_config(name), size, torch.bfloat16, DEVICES["atlas-800i-a2-64g"])
        assert plan.prefill(1, 1024).total_ms < 94
        assert plan.decode(1, 1024, 1024).total_ms < 23


def test_configs_are_read_from_files_and_folders(tmp_path: Path) -> None:
    config_of().save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        assert load_config(str(place)).hidden_size == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config=qwen2-7b", "--tp_size=8"], "28 attention heads over 8 ranks; sizes that work: 1, 2, 4"),
        (["--config=qwen2-7b", "--batch_size=0"], "--batch_size is 0, it must be at least 1"),
        (["--config=qwen2-7b", "--dtype=int8"], "no dtype 'int8'"),
        (["--config=qwen2-7b", "--input_max_len=40000"], "41024 tokens are more than the model's context of 32768"),
        (["--config={folder}", "--tp_size=2"], "was converted for tp_size 4: pass --tp_size=4"),
        (["--config={folder}/nothing/here/at/all"], "is no file or folder, none of qwen2-0.5b"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    config_of().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "npu_tuned_layout": {"version": 1, "tp_size": 4}}))
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_model_that_cannot_be_divided_has_no_plan() -> None:
    with pytest.raises(UserError, match="sizes that work"):
        Plan(config_of(), 3, torch.bfloat16, CARD)
