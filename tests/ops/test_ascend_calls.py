"""The calls to torch_npu fit the schemas of both ends of the supported range, 2.1.0.post17 and 2.13.0.

torch_npu itself is not here: a recorder stands in for it, and the calls it records are bound to the schemas as the two
wheels declare them.
"""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from npu_tuned_model import ops
from npu_tuned_model.ops import ascend, attention_calls, dispatch, portable

TAIL_PFA = (
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, "
    "Tensor? deq_scale1=None, Tensor? quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, int num_heads=1, float scale_value=1., int pre_tokens=2147483647, "
    "int next_tokens=0, str input_layout='BSH', int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, "
    "int sparse_mode=0"
)
TAIL_IFA = (
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? kv_padding_size=None, int num_heads=1, float scale_value=1., "
    "str input_layout='BSH', int num_key_value_heads=0, int block_size=0, int inner_precise=1"
)
TAIL_FIA = (
    "Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
    "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
    "float scale=1., int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"
)
QKV = "Tensor query, Tensor key, Tensor value, *, "
COMMON = {
    "npu_rms_norm": "Tensor input, Tensor gamma, float epsilon=1e-06",
    "npu_add_rms_norm": "Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06",
    "scatter_update_": "Tensor input, Tensor indices, Tensor updates, int axis",
    "npu_prompt_flash_attention": QKV + TAIL_PFA,
    "npu_incre_flash_attention": QKV + TAIL_IFA,
    "npu_fused_infer_attention_score": QKV + TAIL_FIA,
    "npu_swiglu": "Tensor input, int dim=-1",
    "npu_trans_quant_param": "Tensor scale, Tensor? offset=None, int? round_mode=0",
}
ROPE = "Tensor query, Tensor key, Tensor cos, Tensor sin, str layout={}, str rotary_mode='half'"
WEIGHT_QUANT = (
    "Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, Tensor? quant_scale=None, "
    "Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0"
)
QUANT_MATMUL = (
    "Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? bias=None, "
)
ALL_REDUCE = (
    "Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, Tensor? pertoken_scale=None, "
    "Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, int antiquant_group_size=0, int comm_turn=0"
)
DYNAMIC_QUANT = "Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
SCHEMAS = {
    "2.1.0.post17": {
        **COMMON,
        "npu_apply_rotary_pos_emb": ROPE.format("'BSH'"),
        "npu_rotary_mul": "Tensor input, Tensor r1, Tensor r2, str rotary_mode='half'",
        "npu_weight_quant_batchmatmul": WEIGHT_QUANT,
        "npu_quant_matmul": QUANT_MATMUL + "ScalarType? output_dtype=None, SymInt[]? group_sizes=None",
        "npu_mm_all_reduce_base": ALL_REDUCE,
        "npu_dynamic_quant": DYNAMIC_QUANT + "ScalarType? dst_type=None",
    },
    "2.13.0": {
        **COMMON,
        "npu_apply_rotary_pos_emb": ROPE.format("'BSND'"),
        "npu_rotary_mul": "Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None",
        "npu_weight_quant_batchmatmul": WEIGHT_QUANT + ", int? weight_dtype=None",
        "npu_quant_matmul": QUANT_MATMUL
        + "int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
        "int? scale_dtype=None, SymInt[]? group_sizes=None, Tensor? y_scale=None",
        "npu_mm_all_reduce_base": ALL_REDUCE + ", SymInt[]? group_sizes=None, int? y_dtype=None",
        "npu_dynamic_quant": DYNAMIC_QUANT + "int? dst_type=None, str quant_mode='pertoken', float dst_type_max=0.0",
    },
}
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
    for version, schemas in SCHEMAS.items():
        before, _, after = schemas[name].partition("*, ")
        leading = re.findall(r"(\w+)(?=[=,]|$)(?:=[^,]*)?", before.rstrip(", "))
        names = {argument.split("=")[0].split()[-1] for argument in (before + after).split(", ") if argument.strip()}
        assert len(positional) <= len(leading), f"{version}: {name} takes {len(leading)} positional arguments"
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
    assert {call[0] for call in CALLS} == set(ops.__all__) - {"compressed_causal_mask"}


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
    torchair = Recorder("torchair")
    torchair.ops = Recorder("torchair.ops")
    monkeypatch.setitem(sys.modules, "torch_npu.dynamo", SimpleNamespace(torchair=torchair))
    lengths = torch.tensor([6, 2])
    ops.npu_fused_infer_attention_score(Q, KV, KV, **HEADS, scale=1.0, actual_seq_lengths_kv=lengths)
    assert vendor.calls == []
    ((name, positional, keyword),) = torchair.ops.calls
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
