"""torchair's graphs on the simulated NPU: built to the last GE node, then run by interpreting the FX graph behind them.

This file stands in for CANN's graph engine and is the only place that replaces anything of torchair's. Everything up
to the engine is torchair's own work: dynamo's trace, the FX passes, the converters, the optimised GE graph.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any, Callable

from torch._ops import OpOverload

from npu_tuned_model.simulate.device import inside_ge_graph

# what carries data in and out rather than computing
NO_WORK = ("Data", "RefData", "Const", "ConstPlaceHolder", "NetOutput")


def node_counts(ge_graph: Any) -> Counter[str]:
    """The nodes of a GE graph by type, without those that compute nothing."""
    return Counter(node.type for node in ge_graph.op if node.type not in NO_WORK)


def install() -> None:
    """Let torchair's compiled graphs run on the simulated device.

    A GE graph is a function of its inputs: its rotary operator doesn't overwrite them, and what it writes to a cache is
    in the FX graph as a copy. A captured graph replays eager kernels, so it is run as eager code is.
    """
    from torch_npu.dynamo import torchair  # noqa: F401  after this the modules below can be imported
    from torchair._acl_concrete_graph.fx2acl_converter import AclConcreteGraph
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter

    shown: set[int] = set()

    def run_ge_graph(graph: Any, *args: Any) -> tuple[Any, ...]:
        if graph.config.export.export_mode:
            raise NotImplementedError("torchair.dynamo_export needs CANN; the simulated NPU has no offline models")
        if id(graph) not in shown:
            shown.add(id(graph))
            _show("GE graph", graph.graph.name, node_counts(graph.graph))
        with inside_ge_graph():
            return tuple(graph.fx_graph(*args))

    def run_captured_graph(graph: Any, *args: Any) -> Any:
        if id(graph) not in shown:
            shown.add(id(graph))
            targets = (node.target for node in graph.fx_graph.graph.nodes)
            operators = Counter(str(target) for target in targets if isinstance(target, OpOverload))
            _show("captured graph", graph.fx_graph_name, operators)
        return graph.fx_graph(*args)

    # the engine would be started when a graph is built, and asked what its operators look like
    fx2ge_converter.initialize_graph_engine = lambda *options: None
    compat_ir.is_cann_compat = lambda *question, **details: ""
    fx2ge_converter.GeConcreteGraph.__call__ = run_ge_graph
    # what torchair's compile cache writes to disk and runs when it is loaded
    fx2ge_converter.GeConcreteGraph.codegen = _code_of_ge_graph
    AclConcreteGraph.__call__ = run_captured_graph
    # without generated code torchair calls the graph object itself
    AclConcreteGraph.codegen = lambda *arguments, **options: None


def _code_of_ge_graph(graph: Any, extend_config: Any = None, enable_cache: bool = False) -> str:
    _show("GE graph", graph.graph.name, node_counts(graph.graph))
    fx_graph = pickle.dumps(graph.fx_graph)
    return f"from {__name__} import kernel_of\nkernel = kernel_of({fx_graph!r})\n"


def kernel_of(pickled: bytes) -> Callable[..., tuple[Any, ...]]:
    """The function that a graph of the compile cache is: only code that this file wrote calls it."""
    fx_graph = pickle.loads(pickled)

    def kernel(*args: Any) -> tuple[Any, ...]:
        with inside_ge_graph():
            return tuple(fx_graph(*args))

    return kernel


def _show(kind: str, name: str, counts: Counter[str]) -> None:
    types = ", ".join(f"{node} {count}" for node, count in counts.most_common())
    print(f"simulated NPU: {kind} {name} has {sum(counts.values())} nodes that compute: {types}", flush=True)
