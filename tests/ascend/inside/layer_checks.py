"""What must hold for the GE graph of a step, as functions: the tests apply them to the model and to broken ones."""

from __future__ import annotations

from collections import Counter

from npu_tuned_model.simulate.graph_recorder import Node, RecordedGraph

ATTENTION = {"prefill": "PromptFlashAttention", "decode": "IncreFlashAttention"}
MOST_IN_A_LAYER = 16
MOST_OUTSIDE = 8
EACH_LAYER = {"ApplyRotaryPosEmb": 1, "Scatter": 2, "AddRmsNorm": 2, "SwiGlu": 1}
# looking up the scales of int8 rows, and multiplying by them
INT8_LOOK_UP = 4
MATMUL, INT8_MATMUL = "MatMul", "WeightQuantBatchMatmulV2"
# the rotary converter's own: one copy of the query and one of the key
ROTARY_COPIES = {"TensorMove": 2}
FORBIDDEN = ("Cast", "Fill", "Transpose")


def check_layers(one: RecordedGraph, two: RecordedGraph, attention: str, matmul: str = MATMUL) -> None:
    """Check what a second layer adds to a graph of one."""
    layer = kinds(two.working_nodes())
    layer.subtract(kinds(one.working_nodes()))
    outside = kinds(one.working_nodes())
    outside.subtract(layer)
    for kind in FORBIDDEN:
        assert layer[kind] == 0, f"{layer[kind]} {kind} in each layer"
    for kind, count in {**EACH_LAYER, **ROTARY_COPIES, attention: 1, matmul: 4}.items():
        assert layer[kind] == count, f"{layer[kind]} {kind} in each layer, not {count}"
    assert sum(layer.values()) <= MOST_IN_A_LAYER, f"{sum(layer.values())} nodes in each layer: {layer}"
    most_outside = MOST_OUTSIDE + (INT8_LOOK_UP if matmul == INT8_MATMUL else 0)
    assert sum(outside.values()) <= most_outside, f"{sum(outside.values())} nodes outside the layers: {outside}"


def check_cache(graph: RecordedGraph, attention: str) -> None:
    """Check that the cache is written where it is, and that decode reads what was written, not a copy."""
    kind = {node.name: node.kind for node in graph.ge_nodes}
    writes = [node for node in graph.ge_nodes if node.kind == "Scatter"]
    assert {kind[node.inputs[0]] for node in writes} == {"Data"}, "the cache that is written is no input of the graph"
    if attention == ATTENTION["decode"]:
        read = {kind[name] for node in graph.ge_nodes if node.kind == attention for name in node.inputs[1:3]}
        assert read == {"Scatter"}, f"decode reads the result of {read}"


def check_rotary_layout(graph: RecordedGraph) -> None:
    """BSND is 1 in GE's numbering, and the default, which torchair leaves out."""
    layouts = {node.integers.get("layout", 1) for node in graph.ge_nodes if node.kind == "ApplyRotaryPosEmb"}
    assert layouts == {1}, f"rotary layout {layouts}"


def kinds(nodes: list[Node]) -> Counter[str]:
    return Counter("MatMul" if node.kind == "MatMulV2" else node.kind for node in nodes)
