"""Captured graphs: no length is baked into one; before each replay every attention call gets the new ones."""

from __future__ import annotations

import pytest
from layer_checks import kinds

from npu_tuned_model import Qwen2ForCausalLM
from npu_tuned_model.chip import CAPTURED_MODES
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.ops import fused_attention
from npu_tuned_model.simulate.graph_recorder import RecordedGraph, recorded_graphs
from npu_tuned_model.simulate.unset_model import run_steps, unset_model

pytestmark = pytest.mark.usefixtures("device")
LAYERS, BATCH = 2, 3


def decode_graph(config, mode: str) -> RecordedGraph:
    model: Qwen2ForCausalLM = unset_model(config, LAYERS)
    model.run_graph(GraphOptions(torchair_mode=mode))
    with recorded_graphs() as graphs:
        run_steps(model, batch=BATCH, prompt=16, capacity=32, decode_steps=4)
    assert [graph.mode for graph in graphs] == [mode, mode]
    return graphs[1]


def check_lengths(graph: RecordedGraph) -> None:
    assert not graph.baked, f"inputs {graph.baked} make a capture of their own"
    assert len(graph.updated) == LAYERS, f"{len(graph.updated)} of {LAYERS} attention calls get new lengths"
    for arguments in graph.updated.values():
        (sources,) = arguments.values()
        assert list(arguments) == ["actual_seq_lengths_kv"]
        assert [kind for kind, _ in sources] == ["index"] * BATCH


@pytest.mark.parametrize("mode", CAPTURED_MODES)
def test_lengths_are_updated_before_each_replay(small, mode):
    check_lengths(decode_graph(small, mode))


def test_ge_has_no_captures(small):
    graph = decode_graph(small, "max-autotune")
    assert not graph.updated
    assert kinds(graph.working_nodes())["IncreFlashAttention"] == LAYERS


def test_lengths_under_another_name_go_red(small, monkeypatch):
    fused = fused_attention.npu_fused_infer_attention_score

    def mistaken(*tensors, actual_seq_lengths_kv=None, **arguments):
        # query lengths, which decode ignores: the captured call then has no KV lengths that are updated
        return fused(*tensors, actual_seq_lengths=None if actual_seq_lengths_kv is None else [1] * BATCH, **arguments)

    monkeypatch.setattr(fused_attention, "npu_fused_infer_attention_score", mistaken)
    with pytest.raises(AssertionError, match="0 of 2 attention calls"):
        check_lengths(decode_graph(small, CAPTURED_MODES[0]))


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="no torchair mode 'captured'"):
        GraphOptions(torchair_mode="captured")
