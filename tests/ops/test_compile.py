"""Every op is one graph for torch.compile: checks and dispatch vanish, nothing is read back, the cache isn't copied."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

HEADS = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])


def assert_one_graph(function, *arguments) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = function(*[argument.clone() for argument in arguments])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual = compiled(*[argument.clone() for argument in arguments])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@IMPLEMENTATIONS
def test_norms_rotary_swiglu_and_quant(table):
    def step(x, gamma, cos):
        normed, _, residual = table.npu_add_rms_norm(x, table.npu_rms_norm(x, gamma)[0], gamma)
        query, key = table.npu_apply_rotary_pos_emb(normed, residual, cos, cos)
        gated = table.npu_swiglu(table.npu_rotary_mul(query + key, cos, cos))
        quantised, scale = table.npu_dynamic_quant(gated.reshape(-1, 4))
        return table.npu_quant_matmul(
            quantised, quantised.t(), torch.ones(1), pertoken_scale=scale, output_dtype=torch.bfloat16
        )

    assert_one_graph(step, torch.randn(2, 3, 4, 8), torch.randn(8), torch.rand(2, 3, 1, 8))


@IMPLEMENTATIONS
def test_prefill_and_decode_attention(table):
    mask = ops.compressed_causal_mask("cpu")

    def step(query, key, value, lengths):
        prefill = table.npu_prompt_flash_attention(
            query, key, value, scale_value=0.3, atten_mask=mask, sparse_mode=3, **HEADS
        )
        chunk, lse = table.npu_fused_infer_attention_score(
            query[:, :2], key, value, scale=0.3, atten_mask=mask, sparse_mode=3, softmax_lse_flag=True, **HEADS
        )
        decode = table.npu_incre_flash_attention(
            query[:, :1], key, value, scale_value=0.3, actual_seq_lengths=lengths, **HEADS
        )
        left_padded = table.npu_incre_flash_attention(
            query[:, :1], key, value, scale_value=0.3, actual_seq_lengths=lengths, kv_padding_size=lengths[:1], **HEADS
        )
        return prefill, chunk, lse, decode, left_padded

    assert_one_graph(
        step, torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8), torch.tensor([2, 3])
    )


def test_paged_and_packed_attention():
    def step(query, cache, table, lengths):
        paged, _ = ops.npu_fused_infer_attention_score(
            query,
            cache,
            cache,
            scale=0.3,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="BNSD",
            block_table=table,
            block_size=16,
            actual_seq_lengths_kv=lengths,
        )
        tokens = cache.view(-1, 2, 8)
        packed, _ = ops.npu_fused_infer_attention_score(
            query.reshape(2, 4, 8),
            tokens,
            tokens,
            scale=0.3,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=[7, tokens.shape[0]],
        )
        return paged, packed

    block_table = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    assert_one_graph(step, torch.randn(2, 4, 1, 8), torch.randn(3, 16, 16), block_table, torch.tensor([17, 4]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("axis", [1, 2])
def test_scatter_update(table, axis):
    def step(cache, starts, updates):
        return table.scatter_update_(cache, starts, updates, axis).sum(-1)

    updates = torch.randn(2, 1, 4, 3) if axis == 1 else torch.randn(2, 6, 1, 3)
    assert_one_graph(step, torch.zeros(2, 6, 4, 3), torch.tensor([3, 1]), updates)


@pytest.mark.parametrize("slots", [1, 5])
def test_inductor_writes_the_cache_in_place_and_never_copies_it(slots):
    torch._dynamo.reset()

    def step(cache, starts, updates):
        return ops.scatter_update_(cache, starts, updates, 1)[:, :8].sum(1)

    torch.manual_seed(0)
    cache, starts = torch.zeros(2, 32, 2, 4), torch.tensor([3, 0])
    updates = torch.randn(2, slots, 2, 4)
    expected_cache = cache.clone()
    expected = step(expected_cache, starts, updates)
    with torch.no_grad():
        actual, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), cache, starts, updates)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0)
    assert "empty_strided_cpu((2, 2, 4)" in code
    assert "empty_strided_cpu((2, 32" not in code
    assert ".copy_(" not in code
