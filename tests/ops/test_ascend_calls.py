"""The calls to torch_npu fit the schemas of both ends of the supported range, 2.1.0.post17 and 2.13.0.

torch_npu itself is not here: a recorder stands in for it, and the calls it records are bound to the schemas as the two
wheels declare them.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vendor_schemas import OPERATORS, VERSIONS, vendor_schemas

from npu_tuned_model import ops
from npu_tuned_model.ops import ascend, attention_calls, dispatch, portable

# Left at their default these give wrong or different results, so every call must spell them out.
SPELLED_OUT = {
    "npu_rms_norm": {"epsilon"},
    "npu_add_rms_norm": {"epsilon"},
    "npu_apply_rotary_pos_emb": {"layout", "rotary_mode"},
    "npu_rotary_mul": {"rotary_mode"},
    "npu_swiglu": {"dim"},
    "npu_prompt_flash_attention": {
        *("num_heads", "scale_value", "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads"),
        "sparse_mode",
    },
    "npu_incre_flash_attention": {
        *("num_heads", "scale_value", "input_layout", "num_key_value_heads", "block_size", "inner_precise"),
    },
    "npu_fused_infer_attention_score": {
        *("num_heads", "scale", "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode"),
        *("inner_precise", "block_size", "softmax_lse_flag"),
    },
    "npu_quant_matmul": {"output_dtype"},
    "npu_mm_all_reduce_base": {"reduce_op", "comm_turn"},
}


class Recorder(ModuleType):
    """Answers every op with a marker and keeps what it was called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def op(*positional, **keyword):
            self.calls.append((name, positional, keyword))
            return f"result of {name}"

        return op


@pytest.fixture
def vendor(monkeypatch):
    """A recorder in the place of torch_npu, and the NPU side of every op behind CPU tensors."""
    recorder = Recorder("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", recorder)
    monkeypatch.setattr(dispatch, "portable", ascend)
    return recorder


def assert_binds(name: str, positional: tuple, keyword: dict) -> None:
    for version in VERSIONS:
        arguments = vendor_schemas(version)[name].arguments
        leading = [argument.name for argument in arguments if not argument.kwarg_only]
        assert len(positional) <= len(leading), f"{version}: {name} takes {len(leading)} positional arguments"
        names = {argument.name for argument in arguments}
        assert set(keyword) <= names - set(leading[: len(positional)]), f"{version}: {name} has no such argument"
    assert SPELLED_OUT.get(name, set()) <= set(keyword)


Q, KV = torch.zeros(2, 3, 4, 64), torch.zeros(2, 6, 2, 64)
HEADS = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
COS = torch.zeros(2, 3, 1, 64)
BYTES = torch.zeros(64, 8, dtype=torch.int8)
CALLS = [
    ("npu_rms_norm", (Q, torch.ones(64)), {}),
    ("npu_add_rms_norm", (Q, Q, torch.ones(64)), {"epsilon": 1e-5}),
    ("npu_apply_rotary_pos_emb", (Q, Q[:, :, :2], COS, COS), {}),
    ("npu_rotary_mul", (Q, COS, COS), {}),
    ("scatter_update_", (KV, torch.zeros(2, dtype=torch.int64), KV[:, :1], 1), {}),
    ("npu_prompt_flash_attention", (Q, KV, KV), {**HEADS, "scale_value": 0.125, "actual_seq_lengths": (3, 2)}),
    ("npu_incre_flash_attention", (Q[:, :1], KV, KV), {**HEADS, "scale_value": 0.125, "actual_seq_lengths": [6, 2]}),
    ("npu_fused_infer_attention_score", (Q, KV, KV), {**HEADS, "scale": 0.125, "actual_seq_lengths_kv": [6, 2]}),
    ("npu_swiglu", (Q,), {}),
    ("npu_dynamic_quant", (Q,), {}),
    ("npu_quant_matmul", (BYTES.t(), BYTES, torch.ones(8)), {"output_dtype": torch.float16}),
    ("npu_weight_quant_batchmatmul", (torch.zeros(3, 64), BYTES, torch.ones(8)), {}),
    ("npu_trans_quant_param", (torch.ones(8),), {}),
    ("npu_mm_all_reduce_base", (Q[0], torch.zeros(64, 8), "group"), {}),
]


@pytest.mark.parametrize(("op", "positional", "keyword"), CALLS, ids=[call[0] for call in CALLS])
def test_one_call_that_both_releases_accept(vendor, op, positional, keyword):
    result = getattr(ops, op)(*positional, **keyword)
    ((name, given, named),) = vendor.calls
    assert name == op
    assert_binds(name, given, named)
    if op == "scatter_update_":
        assert result is positional[0]
    else:
        assert result == f"result of {op}"


def test_every_public_op_is_called_here():
    assert {call[0] for call in CALLS} == set(OPERATORS)


def test_next_tokens_and_lists_reach_the_vendor(vendor):
    ops.npu_prompt_flash_attention(Q, KV, KV, **HEADS, scale_value=0.125, actual_seq_lengths_kv=(6, 2))
    _, _, keyword = vendor.calls[0]
    assert keyword["next_tokens"] == 2147483647
    assert keyword["pre_tokens"] == 2147483647
    assert keyword["actual_seq_lengths_kv"] == [6, 2]
    assert keyword["actual_seq_lengths"] is None
    assert keyword["scale_value"] == 0.125


def test_quant_mode_is_passed_only_where_it_is_not_the_default(vendor):
    ops.npu_dynamic_quant(Q)
    ops.npu_dynamic_quant(Q, quant_mode="pertensor")
    assert "quant_mode" not in vendor.calls[0][2]
    assert vendor.calls[1][2]["quant_mode"] == "pertensor"


@pytest.mark.parametrize(
    ("op", "query", "name"),
    [
        ("npu_prompt_flash_attention", Q, "actual_seq_lengths_kv"),
        ("npu_prompt_flash_attention", Q, "actual_seq_lengths"),
        ("npu_incre_flash_attention", Q[:, :1], "actual_seq_lengths"),
    ],
)
def test_prompt_and_incremental_attention_refuse_length_tensors_on_an_npu(vendor, op, query, name):
    message = f"{op}: {name} is a tensor; on an NPU it must be a list of int, or use npu_fused_infer_attention_score"
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(query, KV, KV, **HEADS, scale_value=1.0, **{name: torch.tensor([1, 1])})
    assert vendor.calls == []


def test_fused_attention_gives_length_tensors_to_torchairs_op(vendor, monkeypatch):
    torchair_ops = Recorder("torch.ops.air")
    monkeypatch.setattr(torch.ops, "air", torchair_ops)
    lengths = torch.tensor([6, 2])
    ops.npu_fused_infer_attention_score(Q, KV, KV, **HEADS, scale=1.0, actual_seq_lengths_kv=lengths)
    assert vendor.calls == []
    ((name, positional, keyword),) = torchair_ops.calls
    assert name == "npu_fused_infer_attention_score"
    assert keyword["actual_seq_lengths_kv"] is lengths
    assert_binds(name, positional, keyword)
    with pytest.raises(ValueError, match="both length arguments as lists or both as tensors"):
        ops.npu_fused_infer_attention_score(
            Q, KV, KV, **HEADS, scale=1.0, actual_seq_lengths=[3], actual_seq_lengths_kv=lengths
        )


def test_a_missing_torch_npu_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ImportError, match="need torch_npu, which can't be imported"):
        ascend.npu_swiglu(Q, -1)


def test_the_device_type_chooses_the_backend():
    on_npu = SimpleNamespace(device=SimpleNamespace(type="npu"))
    assert dispatch.backend(on_npu) is ascend
    for device in ("cpu", "meta"):
        assert dispatch.backend(torch.zeros(1, device=device)) is portable


def test_the_public_signatures_are_those_that_the_checks_know():
    for public, checked in (
        (ops.npu_prompt_flash_attention, attention_calls.prompt_call),
        (ops.npu_incre_flash_attention, attention_calls.incremental_call),
        (ops.npu_fused_infer_attention_score, attention_calls.fused_call),
    ):
        assert list(inspect.signature(public).parameters.values()) == list(
            inspect.signature(checked).parameters.values()
        )
