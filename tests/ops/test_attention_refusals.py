"""Every trap of the attention ops is an error that names the value, the limit and the way out."""

from __future__ import annotations

import pytest
import torch

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

IMPLEMENTATIONS = pytest.mark.parametrize("table", [ops, composed], ids=["portable", "composed"])
MASK = torch.zeros(2048, 2048, dtype=torch.bool)
ONE = torch.tensor([1])


def tensors(rows: int, slots: int = 6) -> dict:
    return {
        "query": torch.zeros(2, rows, 4, 8),
        "key": torch.zeros(2, slots, 2, 8),
        "value": torch.zeros(2, slots, 2, 8),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSND",
    }


def prompt(**change: object) -> tuple[str, dict]:
    return "npu_prompt_flash_attention", {**tensors(3), "scale_value": 1.0, **change}


def decode(**change: object) -> tuple[str, dict]:
    return "npu_incre_flash_attention", {**tensors(1), "scale_value": 1.0, **change}


def fused(rows: int = 3, **change: object) -> tuple[str, dict]:
    return "npu_fused_infer_attention_score", {**tensors(rows), "scale": 1.0, **change}


def packed(**change: object) -> tuple[str, dict]:
    arguments = {
        "query": torch.zeros(5, 4, 8),
        "key": torch.zeros(7, 2, 8),
        "value": torch.zeros(7, 2, 8),
        "input_layout": "TND",
        "actual_seq_lengths": [2, 5],
        "actual_seq_lengths_kv": [3, 7],
    }
    return fused(**{**arguments, **change})


def pages(**change: object) -> tuple[str, dict]:
    arguments = {
        "query": torch.zeros(2, 4, 1, 8),
        "key": torch.zeros(5, 16, 16),
        "value": torch.zeros(5, 16, 16),
        "input_layout": "BNSD",
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "block_size": 16,
        "actual_seq_lengths": [5, 5],
    }
    return decode(**{**arguments, **change})


REFUSED = [
    # Masks: dtype, polarity, shape, and the modes that need one.
    (prompt(atten_mask=torch.zeros(3, 6)), "torch.float32; it must be bool, int8 or uint8 .* masked OUT.*float mask"),
    (decode(atten_mask=torch.zeros(2, 6).half()), "never an additive float mask"),
    (prompt(atten_mask=torch.zeros(2, 4, 3, 6).bool()), r"atten_mask \(2, 4, 3, 6\) must be one of"),
    (prompt(atten_mask=torch.zeros(3, 7).bool()), r"atten_mask \(3, 7\) must be one of \(3, 6\)"),
    (fused(atten_mask=torch.zeros(2, 3, 6).bool()), r"atten_mask \(2, 3, 6\) must be one of"),
    (decode(atten_mask=torch.zeros(1, 6).bool()), r"must be one of \(2, 6\), \(2, 1, 6\), \(2, 1, 1, 6\)"),
    (prompt(sparse_mode=1), "sparse_mode 1 needs atten_mask"),
    (prompt(sparse_mode=2), r"sparse_mode 2 needs atten_mask=compressed_causal_mask\(device\)"),
    (fused(sparse_mode=3), "sparse_mode 3 needs atten_mask=compressed_causal_mask"),
    (fused(sparse_mode=4, atten_mask=torch.zeros(3, 6).bool()), "must be the constant 2048 x 2048"),
    (prompt(sparse_mode=3, atten_mask=MASK.view(2048, 1, 2048)), "must be the constant 2048 x 2048"),
    (prompt(sparse_mode=5), "sparse_mode 5 is not supported; choose from 0, 1, 2, 3, 4"),
    (prompt(sparse_mode=13, atten_mask=MASK), "sparse_mode 13 is not supported"),
    # Layouts and heads.
    (prompt(input_layout="SBH"), "choose from BSH, BSND, BNSD, BNSD_BSND, TND"),
    (decode(input_layout="BNSD_BSND"), "choose from BSH, BSND, BNSD"),
    (fused(input_layout="BSH"), "query .* must have 3 dimensions in layout BSH"),
    (fused(input_layout="BNSD"), "query .* has 3 heads in layout BNSD, not 4"),
    (prompt(num_heads=0), "num_heads is 0"),
    (prompt(num_heads=3), r"num_heads 3 must be a multiple .* of num_key_value_heads 2"),
    (prompt(num_key_value_heads=0), "key .* has 2 heads in layout BSND, not 4"),
    (prompt(num_heads=130, num_key_value_heads=2), "at most 64 times"),
    (
        prompt(input_layout="BSH", query=torch.zeros(2, 3, 30), key=torch.zeros(2, 6, 16), value=torch.zeros(2, 6, 16)),
        "last dimension 30 of query is not a multiple of its 4 heads",
    ),
    (
        prompt(input_layout="BSH", query=torch.zeros(2, 3, 32), key=torch.zeros(2, 6, 32), value=torch.zeros(2, 6, 32)),
        "query has head dimension 8 and key 16",
    ),
    (prompt(key=torch.zeros(1, 6, 2, 8), value=torch.zeros(1, 6, 2, 8)), "disagree in batch or length"),
    (prompt(value=torch.zeros(2, 5, 2, 8)), "disagree in batch or length"),
    (prompt(value=torch.zeros(2, 6, 2, 4)), "value has head dimension 4"),
    (prompt(query=torch.zeros(2, 3, 4, 520), key=torch.zeros(2, 6, 2, 520), value=torch.zeros(2, 6, 2, 520)), "512"),
    (prompt(query=torch.zeros(2, 3, 4, 8).half()), "must have one floating-point dtype"),
    (decode(query=torch.zeros(2, 3, 4, 8)), "query has S = 3; it takes S = 1 only"),
    # Lengths.
    (fused(actual_seq_lengths_kv=[1, 7]), "actual_seq_lengths_kv holds 7; each must be from 0 to 6"),
    (decode(actual_seq_lengths=[7, 1]), "actual_seq_lengths holds 7; each must be from 0 to 6"),
    (fused(actual_seq_lengths=[4]), "actual_seq_lengths holds 4; each must be from 0 to 3"),
    (fused(actual_seq_lengths_kv=[-1]), "holds -1"),
    (decode(actual_seq_lengths=[]), "has 0 entries; give 1 for all, or one per row"),
    (decode(actual_seq_lengths=torch.tensor([1, 2]).int()), "must be a list of int or a 1-D int64 tensor"),
    (decode(actual_seq_lengths=torch.ones(2, 1, dtype=torch.int64)), "must be a list of int or a 1-D int64 tensor"),
    # Left padding.
    (decode(kv_padding_size=ONE), "kv_padding_size would be ignored without actual_seq_lengths"),
    (fused(kv_padding_size=ONE), "kv_padding_size would be ignored without actual_seq_lengths_kv"),
    (fused(query_padding_size=ONE), "query_padding_size would be ignored without actual_seq_lengths"),
    (decode(kv_padding_size=torch.tensor([1, 2]), actual_seq_lengths=[1]), "must be one int64 value for all rows"),
    (decode(kv_padding_size=torch.tensor([1.0]), actual_seq_lengths=[1]), "must be one int64 value"),
    (fused(1, query_padding_size=ONE, actual_seq_lengths=[1]), "would be ignored with a query of S = 1"),
    (pages(kv_padding_size=ONE), "can't be combined with a paged cache"),
    # Pages.
    (pages(actual_seq_lengths=None), "block_table needs actual_seq_lengths"),
    (pages(block_size=0), "block_size 0 must be a multiple of 16 and at most 512"),
    (pages(block_size=24), "block_size 24"),
    (pages(block_table=torch.zeros(2, 3)), "must be 2-D int32"),
    (pages(block_table=torch.zeros(3, 3, dtype=torch.int32)), "block_table has 3 rows for a batch of 2"),
    (pages(actual_seq_lengths=[49, 1]), "holds 49; each must be from 0 to 48"),
    (pages(key=torch.zeros(5, 32, 16), value=torch.zeros(5, 32, 16)), r"must be \(blocks, 16, 16\)"),
    (pages(value=torch.zeros(4, 16, 16)), "must have one shape"),
    (
        pages(
            input_layout="BSND",
            query=torch.zeros(2, 1, 4, 8),
            key=torch.zeros(5, 2, 16, 8),
            value=torch.zeros(5, 2, 16, 8),
        ),
        "4-D paged cache needs a BNSD or TND query, not BSND",
    ),
    (
        fused(
            key=torch.zeros(5, 16, 16),
            value=torch.zeros(5, 16, 16),
            block_table=torch.zeros(2, 3, dtype=torch.int32),
            block_size=16,
            actual_seq_lengths_kv=[5],
        ),
        "block_size 16 must be a multiple of 128",
    ),
    # Packed sequences.
    (packed(actual_seq_lengths=None), "packed layouts need actual_seq_lengths and actual_seq_lengths_kv"),
    (packed(actual_seq_lengths=[5]), "actual_seq_lengths has 1 entries and actual_seq_lengths_kv 2"),
    (packed(actual_seq_lengths=[2, 4]), "ends with 4; in a packed layout it must end with 5"),
    (packed(actual_seq_lengths_kv=[8, 7]), r"\[8, 7\] must be cumulative"),
    (packed(atten_mask=torch.zeros(5, 7).bool()), "packed layouts take no full mask"),
    (packed(pse_shift=torch.zeros(1, 4, 5, 7)), "packed layouts take no pse_shift"),
    (packed(kv_padding_size=ONE), "can't be combined with a paged cache or a packed layout"),
    # The rest.
    (prompt(pse_shift=torch.zeros(2, 4, 3, 6).half()), "pse_shift is torch.float16; it must be torch.float32"),
    (prompt(pse_shift=torch.zeros(2, 1, 3, 6)), r"must be \(B or 1, N, Sq, Skv\) = \(2, 4, 3, 6\)"),
    (decode(inner_precise=2), "inner_precise 2 must be 0 or 1 when S is 1"),
    (fused(inner_precise=4), "inner_precise 4 must be 0 to 3"),
    (prompt(quant_scale2=torch.ones(2)), "quant_scale2 .* must be one floating-point value"),
    (prompt(quant_offset2=torch.ones(1)), "quant_offset2 needs quant_scale2"),
]


@IMPLEMENTATIONS
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_refused(table, call, message):
    op, arguments = call
    with pytest.raises(ValueError, match=message) as caught:
        getattr(table, op)(**arguments)
    assert str(caught.value).startswith(f"{op}: ")
    assert "\n" not in str(caught.value)


@IMPLEMENTATIONS
@pytest.mark.parametrize("call", [prompt(), decode(), fused(), packed(), pages()])
def test_the_same_calls_without_the_mistake_are_accepted(table, call):
    op, arguments = call
    getattr(table, op)(**arguments)


@IMPLEMENTATIONS
@pytest.mark.parametrize("call", [prompt(), decode(), fused()])
def test_scale_and_head_count_have_no_default(table, call):
    op, arguments = call
    for required in ("scale" if "scale" in arguments else "scale_value", "num_heads"):
        rest = {name: value for name, value in arguments.items() if name != required}
        with pytest.raises(TypeError, match=required):
            getattr(table, op)(**rest)
