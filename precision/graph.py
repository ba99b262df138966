"""Dumping compiled graphs: they are run node by node, under the names that the same calls have in eager code."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
from torch import fx

from precision import names
from precision.interception import ApiObserver


class GraphRuns:
    """Backends for torch.compile whose graphs can be watched."""

    def __init__(self) -> None:
        self._observer: ApiObserver | None = None

    def backend(self, inner: str | Callable[..., Any]) -> Callable[..., Any]:
        """A backend that hands a graph to `inner` when it first runs unobserved."""

        def compile_graph(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            compiled: list[Callable[..., Any]] = []

            def run(*args: Any) -> Any:
                if self._observer is not None:
                    with torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else contextlib.nullcontext():
                        return NodeRun(graph, self._observer).run(*args)
                if not compiled:
                    compile_inner = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
                    compiled.append(compile_inner(graph, inputs))
                return compiled[0](*args)

            return run

        return compile_graph

    @contextlib.contextmanager
    def observed(self, observer: ApiObserver) -> Iterator[None]:
        """Graphs of these backends run node by node meanwhile."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None


class NodeRun(fx.Interpreter):
    """Runs a graph node by node and tells the observer of each call that has a name in eager code."""

    def __init__(self, graph: fx.GraphModule, observer: ApiObserver) -> None:
        super().__init__(graph)
        self._observer = observer

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = getattr(torch.Tensor, str(target), None)
        if method is None or not isinstance(args[0], torch.Tensor):
            return super().call_method(target, args, kwargs)
        return self._call(method, args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        api = names.api_of(function)
        if api is None:
            return function(*args, **kwargs)
        return self._observer.call(api, function, args, kwargs)
