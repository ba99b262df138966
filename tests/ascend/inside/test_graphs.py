"""The tuned model through torchair to the GE graph: which nodes there are, and how many graphs a generation needs."""

from __future__ import annotations

import pytest
import torch
from conftest import SHAPES
from layer_checks import ATTENTION, INT8_MATMUL, MATMUL, check_cache, check_layers, check_rotary_layout
from torch import Tensor

from npu_tuned_model import Qwen2ForCausalLM, TuningOptions
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.kv_cache import FixedKVCache
from npu_tuned_model.modeling_qwen2 import Qwen2MLP
from npu_tuned_model.ops import ascend
from npu_tuned_model.simulate.graph_recorder import Node, RecordedGraph, recorded_graphs
from npu_tuned_model.simulate.unset_model import run_steps, unset_model

pytestmark = pytest.mark.usefixtures("device")
PROMPT, CAPACITY = 128, 200


def record(config, layers: int, batch: int, *, int8: bool = False, **options) -> tuple[RecordedGraph, RecordedGraph]:
    """The prefill graph and the decode graph."""
    model = unset_model(config, layers, TuningOptions().replace(**options), int8=int8)
    model.run_graph()
    with recorded_graphs() as graphs:
        run_steps(model, batch=batch, prompt=PROMPT, capacity=CAPACITY, decode_steps=2)
    prefill, decode = graphs
    return prefill, decode


def check(config, batch: int, *, int8: bool = False) -> None:
    graphs = (record(config, layers, batch, int8=int8) for layers in (1, 2))
    for phase, one, two in zip(ATTENTION, *graphs):
        check_layers(one, two, ATTENTION[phase], INT8_MATMUL if int8 else MATMUL)
        check_cache(two, ATTENTION[phase])
        check_rotary_layout(two)
        assert two.static


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_nodes(shape, batch):
    check(SHAPES[shape], batch)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weights_add_no_nodes(shape):
    check(SHAPES[shape], 2, int8=True)


def test_a_vocabulary_too_large_for_the_operator_is_cut(small):
    small.vocab_size = 151936
    _, decode = record(small, 1, 1, int8=True)
    assert sum(node.kind == INT8_MATMUL for node in decode.ge_nodes) == 4 + 3


def test_prefill_masks_by_the_compressed_mask(small):
    prefill, _ = record(small, 1, 2)
    (attention,) = (node for node in prefill.ge_nodes if node.kind == ATTENTION["prefill"])
    assert attention.integers["sparse_mode"] == 3
    mask = input_of(prefill, attention, 4)
    assert (mask.kind, mask.shape) == ("Data", (2048, 2048))


def test_lengths_are_one_small_input_of_the_decode_graph(small):
    _, decode = record(small, 1, 4)
    (attention,) = (node for node in decode.ge_nodes if node.kind == ATTENTION["decode"])
    lengths = input_of(decode, attention, 5)
    assert (lengths.kind, lengths.shape) == ("Data", (4,))


def input_of(graph: RecordedGraph, node: Node, index: int) -> Node:
    (source,) = (other for other in graph.ge_nodes if other.name == node.inputs[index])
    return source


@pytest.mark.parametrize("switched_off", [*TuningOptions.names(), "all"])
def test_every_optimisation_can_be_off(small, switched_off):
    names = TuningOptions.names() if switched_off == "all" else (switched_off,)
    prefill, decode = record(small, 1, 2, **dict.fromkeys(names, False))
    assert prefill.working_nodes()
    assert decode.working_nodes()


@pytest.mark.parametrize("attention", ["auto", "fia"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["max-autotune", "npugraph_ex"])
def test_two_graphs_for_200_tokens(small, mode, dynamic, attention):
    model = unset_model(small, 1)
    model.attention = attention
    model.run_graph(GraphOptions(dynamic=dynamic, torchair_mode=mode))
    with recorded_graphs() as graphs:
        run_steps(model, batch=3, prompt=PROMPT, capacity=PROMPT + 200, decode_steps=199)
    assert len(graphs) == 2
    assert model.steps.graphs == {"prefill": 1, "decode": 1}


def test_one_dynamic_graph_for_all_lengths(small):
    model = unset_model(small, 1)
    model.run_graph(GraphOptions(dynamic=True))
    with recorded_graphs() as graphs:
        for prompt, capacity in ((64, 100), (65, 1000), (300, 700)):
            run_steps(model, batch=2, prompt=prompt, capacity=capacity, decode_steps=2)
    assert len(graphs) == 2
    assert model.steps.graphs == {"prefill": 1, "decode": 1}


# what must turn the checks red


class CastingMLP(Qwen2MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float().to(hidden.dtype))


def test_a_cast_in_a_layer_goes_red(small, monkeypatch):
    monkeypatch.setattr("npu_tuned_model.modeling_qwen2.Qwen2MLP", CastingMLP)
    with pytest.raises(AssertionError, match="Cast in each layer"):
        check(small, 2)


def test_plain_weights_go_red(small):
    with pytest.raises(AssertionError, match="4 Transpose in each layer"):
        check_layers(
            record(small, 1, 2, packed_weights=False)[1],
            record(small, 2, 2, packed_weights=False)[1],
            ATTENTION["decode"],
        )


def test_a_copied_cache_goes_red(small, monkeypatch):
    append = FixedKVCache.append

    def copying(*arguments):
        keys, values = append(*arguments)
        return keys, values.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(FixedKVCache, "append", copying)
    with pytest.raises(AssertionError, match="decode reads the result of"):
        check_cache(record(small, 1, 2)[1], ATTENTION["decode"])


def test_another_rotary_layout_goes_red(small, monkeypatch):
    rotary = ascend.npu_apply_rotary_pos_emb

    def other(query, key, cos, sin, layout, rotary_mode):
        return rotary(query, key, cos, sin, "SBND", rotary_mode)

    monkeypatch.setattr(ascend, "npu_apply_rotary_pos_emb", other)
    with pytest.raises(AssertionError, match="rotary layout"):
        check_rotary_layout(record(small, 1, 2)[1])


def test_a_length_as_a_plain_integer_goes_red(small, monkeypatch):
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda tensor, dim: None)
    model: Qwen2ForCausalLM = unset_model(small, 1)
    model.run_graph()
    with recorded_graphs() as graphs:
        run_steps(model, batch=2, prompt=PROMPT, capacity=CAPACITY, decode_steps=3)
    assert len(graphs) == 4
