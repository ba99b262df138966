"""Dumping compiled graphs: they are run node by node, under the names that the same calls have in eager code."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any, Callable, Iterator

import torch
from torch import fx

from precision import names
from precision.interception import ApiObserver

# how dynamo spells the module a node came from: L['self'].model.layers[0], or with _modules['0'] in between
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")


class GraphRuns:
    """Backends for torch.compile whose graphs can be watched.

    Attributes:
        running: the record of the module that the current node came from, outermost first.
        graphs, nodes: how many graphs ran while watched, and how many of their nodes were calls with a name.
        elsewhere: what dumps graphs that aren't watched here, in words; empty for nothing.
    """

    def __init__(self) -> None:
        self.running: list[str] = []
        self.graphs = self.nodes = 0
        self.elsewhere = ""
        self._observer: ApiObserver | None = None
        self._calls: Counter[str] = Counter()

    def backend(self, inner: str | Callable[..., Any]) -> Callable[..., Any]:
        """A backend that hands a graph to `inner` when it first runs unobserved."""

        def compile_graph(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            compiled: list[Callable[..., Any]] = []

            def run(*args: Any) -> Any:
                if self._observer is not None:
                    self.graphs += 1
                    return _NodeRun(graph, self, self._observer).run(*args)
                if not compiled:
                    make = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
                    compiled.append(make(graph, inputs))
                return compiled[0](*args)

            return run

        return compile_graph

    def __str__(self) -> str:
        if not self.graphs and self.elsewhere:
            return self.elsewhere
        if not self.graphs:
            return "no graph ran: pass torch.compile(backend=debugger.compile_backend()) for what is to be dumped"
        return f"ran {self.graphs} graphs node by node, {self.nodes} calls"

    @contextlib.contextmanager
    def observed(self, observer: ApiObserver) -> Iterator[None]:
        """Graphs of these backends run node by node meanwhile."""
        self._observer = observer
        self.graphs = self.nodes = 0
        self._calls.clear()
        try:
            yield
        finally:
            self._observer = None
            self.running = []

    def module_records(self, node: fx.Node, entered: dict[str, int]) -> list[str]:
        """Records of the modules that a node came from; `entered` holds this graph run's call numbers."""
        records = []
        for where, kind in (node.meta.get("nn_module_stack") or {}).values():
            path = _dotted(where)
            if path:
                if path not in entered:
                    entered[path] = self._calls[path]
                    self._calls[path] += 1
                kind_name = kind if isinstance(kind, str) else kind.__name__
                records.append(f"Module.{path}.{kind_name.rpartition('.')[2]}.forward.{entered[path]}")
        return records


class _NodeRun(fx.Interpreter):
    """Runs a graph node by node and tells the observer of each call that has a name in eager code."""

    def __init__(self, graph: fx.GraphModule, runs: GraphRuns, observer: ApiObserver) -> None:
        super().__init__(graph)
        self._runs = runs
        self._observer = observer
        self._entered: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._runs.running = self._runs.module_records(n, self._entered)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(_as_method(target, args), args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = getattr(torch.Tensor, str(target), None)
        if method is None or not isinstance(args[0], torch.Tensor):
            return super().call_method(target, args, kwargs)
        return self._call(method, args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        api = names.api_of(function) if callable(function) else None
        if api is None or not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values(), *_flat(args))):
            return function(*args, **kwargs)
        self._runs.nodes += 1
        return self._observer.call(api, function, args, kwargs)


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for value in args:
        if isinstance(value, (tuple, list)):
            yield from value


def _as_method(target: Any, args: tuple[Any, ...]) -> Any:
    """The tensor method behind Python's operator module, as eager code's function mode reports it."""
    if getattr(target, "__module__", None) in ("_operator", "operator") and any(
        isinstance(value, torch.Tensor) for value in args
    ):
        name = {"truediv": "div", "itruediv": "div_", "iadd": "add_", "imul": "mul_", "isub": "sub_"}.get(
            target.__name__, target.__name__
        )
        method = getattr(torch.Tensor, name, None)
        if method is not None and isinstance(args[0], torch.Tensor) and name != "getitem":
            return method
    return target


def _dotted(where: str) -> str:
    """model.layers.0 for L['self'].model.layers[0]."""
    path = _INDEX.sub(r".\1", where.replace("._modules", ""))
    parts = [part for part in path.split(".") if part]
    return ".".join(parts[2:] if parts[:2] == ["L", "self"] else parts)
