"""Shapes and dtypes of the results, as the vendor's Meta kernels give them (operator reference, 15.5)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_tuned_model import ops
from npu_tuned_model.ops import composed

HALF, FULL, BYTE, WORD = torch.float16, torch.float32, torch.int8, torch.int32
GQA = {"num_heads": 14, "num_key_value_heads": 2}
PROMPT = {**GQA, "scale_value": 0.125}
FUSED = {**GQA, "scale": 0.125}
PAGES = {"input_layout": "BNSD", "block_size": 128}


class Make:
    """Builds an argument on the device under test: a shape and a dtype, or given values."""

    def __init__(self, *shape: int, dtype: torch.dtype = HALF, value: object = None) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value

    def on(self, device: str) -> Tensor:
        if self.value is not None:
            return torch.tensor(self.value, dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def q(*shape: int) -> Make:
    return Make(*shape)


# (op, positional arguments, keyword arguments, expected [(shape, dtype), ...])
TABLE = [
    ("npu_rms_norm", [q(2, 3, 4, 8), q(4, 8)], {}, [((2, 3, 4, 8), HALF), ((2, 3, 1, 1), FULL)]),
    (
        "npu_add_rms_norm",
        [q(2, 3, 8), q(2, 3, 8), q(8)],
        {},
        [((2, 3, 8), HALF), ((2, 3, 1), FULL), ((2, 3, 8), HALF)],
    ),
    (
        "npu_apply_rotary_pos_emb",
        [q(2, 3, 14, 64), q(2, 3, 2, 64), q(2, 3, 1, 64), q(2, 3, 1, 64)],
        {},
        [((2, 3, 14, 64), HALF), ((2, 3, 2, 64), HALF)],
    ),
    ("npu_rotary_mul", [q(2, 14, 3, 64), q(1, 1, 3, 64), q(1, 1, 3, 64)], {}, [((2, 14, 3, 64), HALF)]),
    ("npu_prompt_flash_attention", [q(1, 5, 896), q(1, 9, 128), q(1, 9, 128)], PROMPT, [((1, 5, 896), HALF)]),
    (
        "npu_prompt_flash_attention",
        [q(1, 14, 5, 64), q(1, 2, 9, 64), q(1, 2, 9, 64)],
        {**PROMPT, "input_layout": "BNSD_BSND"},
        [((1, 5, 14, 64), HALF)],
    ),
    (
        "npu_prompt_flash_attention",
        [q(5, 14, 192), q(9, 2, 192), q(9, 2, 128)],
        {**PROMPT, "input_layout": "TND", "actual_seq_lengths": [5], "actual_seq_lengths_kv": [9]},
        [((5, 14, 128), HALF)],
    ),
    (
        "npu_prompt_flash_attention",
        [q(1, 5, 896), q(1, 9, 128), q(1, 9, 128)],
        {**PROMPT, "quant_scale2": Make(value=[1.0], dtype=FULL)},
        [((1, 5, 896), BYTE)],
    ),
    ("npu_incre_flash_attention", [q(2, 1, 896), q(2, 9, 128), q(2, 9, 128)], PROMPT, [((2, 1, 896), HALF)]),
    (
        "npu_incre_flash_attention",
        [q(2, 14, 1, 64), q(8, 2, 128, 64), q(8, 2, 128, 64)],
        {**PROMPT, **PAGES, "block_table": Make(2, 4, dtype=WORD), "actual_seq_lengths": [130, 4]},
        [((2, 14, 1, 64), HALF)],
    ),
    (
        "npu_fused_infer_attention_score",
        [q(2, 14, 1, 64), q(8, 2, 128, 64), q(8, 2, 128, 64)],
        {**FUSED, **PAGES, "block_table": Make(2, 4, dtype=WORD), "actual_seq_lengths_kv": [130, 4]},
        [((2, 14, 1, 64), HALF), ((0,), FULL)],
    ),
    (
        "npu_fused_infer_attention_score",
        [q(2, 5, 896), q(2, 9, 128), q(2, 9, 128)],
        FUSED,
        [((2, 5, 896), HALF), ((0,), FULL)],
    ),
    (
        "npu_fused_infer_attention_score",
        [q(2, 5, 896), q(2, 9, 128), q(2, 9, 128)],
        {**FUSED, "softmax_lse_flag": True},
        [((2, 5, 896), HALF), ((2, 14, 5, 1), FULL)],
    ),
    (
        "npu_fused_infer_attention_score",
        [q(7, 14, 128), q(7, 2, 128), q(7, 2, 128)],
        {
            **FUSED,
            "input_layout": "TND",
            "actual_seq_lengths": [3, 7],
            "actual_seq_lengths_kv": [3, 7],
            "softmax_lse_flag": True,
        },
        [((7, 14, 128), HALF), ((7, 14, 1), FULL)],
    ),
    (
        "npu_fused_infer_attention_score",
        [q(2, 5, 14, 64), q(2, 9, 2, 64), q(2, 9, 2, 64)],
        {**FUSED, "input_layout": "BSND_NBSD"},
        [((14, 2, 5, 64), HALF), ((0,), FULL)],
    ),
    ("npu_swiglu", [q(2, 3, 16)], {}, [((2, 3, 8), HALF)]),
    (
        "npu_weight_quant_batchmatmul",
        [q(3, 64), Make(64, 128, dtype=BYTE), q(128)],
        {},
        [((3, 128), HALF)],
    ),
    (
        "npu_weight_quant_batchmatmul",
        [q(3, 64), Make(64, 16, dtype=WORD), q(128)],
        {},
        [((3, 128), HALF)],
    ),
    (
        "npu_quant_matmul",
        [Make(3, 64, dtype=BYTE), Make(64, 128, dtype=BYTE), Make(128, dtype=FULL)],
        {"output_dtype": BYTE},
        [((3, 128), BYTE)],
    ),
    ("npu_dynamic_quant", [q(2, 3, 64)], {}, [((2, 3, 64), BYTE), ((2, 3), FULL)]),
    ("npu_dynamic_quant", [q(2, 3, 64)], {"quant_mode": "perchannel"}, [((2, 3, 64), BYTE), ((2, 64), FULL)]),
    ("npu_dynamic_quant", [q(2, 3, 64)], {"quant_mode": "pertensor"}, [((2, 3, 64), BYTE), ((1,), FULL)]),
    ("npu_dynamic_quant", [q(2, 3, 64)], {"dst_type": torch.quint4x2}, [((2, 3, 8), WORD), ((2, 3), FULL)]),
    ("npu_mm_all_reduce_base", [q(2, 3, 64), q(64, 128), "group"], {}, [((2, 3, 128), HALF)]),
]
# Packs bits: no sequence of small ops was fused into it.
PORTABLE_ONLY = [("npu_trans_quant_param", [Make(128, dtype=FULL)], {}, [((128,), torch.int64)])]
CASES = [(ops, *row) for row in TABLE + PORTABLE_ONLY] + [(composed, *row) for row in TABLE]
NAMES = [f"{row[0].__name__.split('.')[-1]}-{row[1]}-{index}" for index, row in enumerate(CASES)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("table", "op", "positional", "keyword", "expected"), CASES, ids=NAMES)
def test_results_have_the_vendors_shapes_and_dtypes(table, op, positional, keyword, expected, device):
    positional = [item.on(device) if isinstance(item, Make) else item for item in positional]
    keyword = {name: item.on(device) if isinstance(item, Make) else item for name, item in keyword.items()}
    results = getattr(table, op)(*positional, **keyword)
    results = [results] if isinstance(results, Tensor) else list(results)
    assert [(tuple(result.shape), result.dtype) for result in results] == expected
    assert all(result.device.type == device for result in results)
