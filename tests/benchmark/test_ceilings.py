"""The work that shares are computed from is the work that a model does, and ceilings are rates of what was run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmark.ceilings import Ceilings, utilisation
from npu_tuned_model.work import work_of

CPU = torch.device("cpu")


def config_of(*, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_stock_model(tied: bool) -> None:
    config = config_of(tied=tied)
    model = Qwen2ForCausalLM(config)
    work = work_of(config, dtype=torch.bfloat16, batch=1, length=8)
    assert work.weight_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    looked_up_only = 0 if tied else 2 * 96 * 32
    assert work.step_weight_bytes == work.weight_bytes - looked_up_only


def test_flops_of_one_token_are_those_that_torch_counts() -> None:
    # one token per row: no causal half, and the last token's logits are all logits
    config = config_of(tied=False)
    model = Qwen2ForCausalLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(5, 1, dtype=torch.int64))
    work = work_of(config, dtype=torch.float32, batch=5, length=1)
    assert work.prefill_flops == counter.get_total_flops()


def test_attention_counts_the_causal_half() -> None:
    config = config_of(tied=True)
    flops = [work_of(config, dtype=torch.float32, batch=1, length=length).prefill_flops for length in (1, 2, 3)]
    # the second difference is attention's alone: 4 * hidden * layers for each further (query, key) pair
    assert flops[2] - 2 * flops[1] + flops[0] == 4 * 32 * 3


def test_kv_bytes_are_those_of_the_stock_cache() -> None:
    config = config_of(tied=True)
    with torch.no_grad():
        cache = Qwen2ForCausalLM(config)(torch.ones(2, 7, dtype=torch.int64)).past_key_values
    stored = sum(tensor.nbytes for layer in cache for tensor in layer)
    work = work_of(config, dtype=torch.float32, batch=2, length=7)
    assert work.kv_bytes_per_token * 2 * 7 == stored
    assert work.decode_bytes(14) == work.step_weight_bytes + stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_ceilings_are_consistent(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.ceilings.SQUARE", 64)
    config = config_of(tied=True)
    work = work_of(config, dtype=dtype, batch=2, length=8)
    limits = Ceilings(config, work, device=CPU, dtype=dtype, rows=16).measure()
    assert limits["bandwidth_gb_per_s"] > 0
    assert limits["matmul_tflop_per_s"] > 0
    read = limits["weights_read_ms"] / 1000 * limits["bandwidth_gb_per_s"] * 1e9
    assert read == pytest.approx(work.step_weight_bytes)


def test_a_buffer_smaller_than_the_weights_stands_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.ceilings.SQUARE", 64)
    monkeypatch.setattr("benchmark.ceilings.LARGEST_BUFFER", 4096)
    config = config_of(tied=True)
    work = work_of(config, dtype=torch.float32, batch=1, length=8)
    ceilings = Ceilings(config, work, device=CPU, dtype=torch.float32, rows=8)
    assert ceilings._buffer.nbytes == 4096 < work.step_weight_bytes
    limits = ceilings.measure()
    read = limits["weights_read_ms"] / 1000 * limits["bandwidth_gb_per_s"] * 1e9
    assert read == pytest.approx(work.step_weight_bytes)


def test_utilisation_is_one_at_the_ceiling() -> None:
    work = work_of(config_of(tied=True), dtype=torch.float32, batch=1, length=8)
    limits = {"matmul_tflop_per_s": 2.0, "bandwidth_gb_per_s": 10.0, "weights_read_ms": work.step_weight_bytes / 1e7}
    figures = {"prefill_ms": work.prefill_flops / 2e12 * 1000, "decode_ms": work.decode_bytes(20) / 10e9 * 1000}
    shares = utilisation(figures, limits, work, tokens_in_cache=20)
    assert shares["prefill_share_of_matmul_peak"] == pytest.approx(1.0)
    assert shares["decode_share_of_bandwidth"] == pytest.approx(1.0)
    assert shares["decode_per_weights_read"] == pytest.approx(work.decode_bytes(20) / work.step_weight_bytes)
    without = utilisation({**figures, "decode_ms": None}, limits, work, tokens_in_cache=20)
    assert without["decode_share_of_bandwidth"] is None
    assert without["decode_per_weights_read"] is None
