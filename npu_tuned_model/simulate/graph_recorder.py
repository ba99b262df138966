"""Keep the graphs that torchair builds, without an engine to run them: results are tensors of the right shape, unset.

For tests and for the table of nodes. Like graph_engine.py, this stands in for CANN and replaces what torchair would
hand its finished graph to; all that comes before is torchair's own work.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Iterator
from unittest import mock

import torch
from torch import Tensor

from npu_tuned_model.simulate.graph_engine import NO_WORK


@dataclass(frozen=True)
class Node:
    """One node of a GE graph.

    Attributes:
        kind: its operator, "MatMul", "Scatter", ...
        inputs: names of the nodes that its inputs come from, in order; "" for one that is left out.
        shape: of an input of the graph, -1 where it is not known before; what others give only the engine works out.
        integers: its attributes that are integers, "sparse_mode", "layout", ...
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    integers: dict[str, int]


@dataclass(frozen=True)
class RecordedGraph:
    """A graph that torchair has finished.

    Attributes:
        mode: torchair's mode, "max-autotune" or one that captures.
        fx_graph: the FX graph behind it, after torchair's passes.
        ge_nodes: the GE graph, carriers of data included; empty for a graph that is captured.
        static: every input has a known shape. torchair can put the whole of such a graph on the device at once.
        updated: for each node of a captured graph that gets new host integers before a replay, its arguments and where
            they come from: {"npu_fused_infer_attention_score_out": {"actual_seq_lengths_kv": [("index", 3), ...]}}.
        baked: inputs of a captured graph whose value makes a capture of its own.
    """

    mode: str
    fx_graph: torch.fx.GraphModule
    ge_nodes: tuple[Node, ...]
    static: bool
    updated: dict[str, Any]
    baked: tuple[Any, ...]

    def working_nodes(self) -> list[Node]:
        """The GE nodes that compute or copy something."""
        return [node for node in self.ge_nodes if node.kind not in NO_WORK]


@contextlib.contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """A list that every graph joins when it is first called; calls return unset tensors meanwhile."""
    import torch_npu  # noqa: F401  makes torchair importable
    import torchair  # noqa: F401
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter

    graphs: list[RecordedGraph] = []
    seen: set[int] = set()

    def run(concrete: Any, *inputs: Any) -> tuple[Any, ...]:
        if id(concrete) not in seen:
            seen.add(id(concrete))
            graphs.append(_record(concrete))
        (output,) = concrete.fx_graph.graph.find_nodes(op="output")
        return tuple(_unset(node) for node in output.args[0])

    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            # the engine would be started when a graph is built, and asked what its operators look like
            (fx2ge_converter, "initialize_graph_engine", lambda *options: None),
            (compat_ir, "is_cann_compat", lambda *question, **details: ""),
            (fx2ge_converter.GeConcreteGraph, "__call__", run),
            (AclConcreteGraph, "__call__", run),
            # without generated code torchair calls the graph object itself
            (AclConcreteGraph, "codegen", lambda *arguments, **options: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield graphs


def _record(concrete: Any) -> RecordedGraph:
    mode = concrete.config.mode.value
    if mode != "max-autotune":
        info = concrete._aclgraph_cache_info
        return RecordedGraph(
            mode, concrete.fx_graph, (), True, dict(info.ops_update_rulers), tuple(info.unupdated_sym_input_index)
        )
    return RecordedGraph(
        mode, concrete.fx_graph, tuple(_nodes(concrete.graph)), not concrete.is_dynamic, updated={}, baked=()
    )


def _nodes(ge_graph: Any) -> Iterator[Node]:
    for op in ge_graph.op:
        inputs = tuple(source.partition(":")[0] for source in op.input)
        shape = tuple(op.output_desc[0].shape.dim) if op.output_desc else ()
        integers = {name: value.i for name, value in op.attr.items() if value.WhichOneof("value") == "i"}
        yield Node(op.name, op.type, inputs, shape, integers)


def _unset(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, Tensor):
        return value
    sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device)
