"""Which module is running, and what goes into it and comes out: hooks on the modules of one or several models."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleObserver(Protocol):
    """What is told of module calls. Hooks run while torch's modes are on: an observer switches them off itself."""

    def enter(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A module is about to run; returns its record's name. The path of a model itself is empty."""

    def leave(self, module: nn.Module, record: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """It has run."""


class RunningModules(Protocol):
    """Whoever knows which modules run right now."""

    @property
    def running(self) -> list[str]:
        """The records of the modules that the current call is inside, outermost first."""


class ModuleHooks:
    """Forward hooks on every module of the models, and the stack of modules that run right now in each thread."""

    def __init__(self, models: list[nn.Module], observer: ModuleObserver) -> None:
        self._observer = observer
        self._local = threading.local()
        self._handles: list[RemovableHandle] = []
        self.hooked = 0
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            for path, module in model.named_modules():
                self._hook(module, f"{prefix}{path}".rstrip(".") if path else "")

    @property
    def running(self) -> list[str]:
        """The records of the modules that this thread is inside, outermost first."""
        return [record for _, record in self._stack() if record]

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, module: nn.Module, path: str) -> None:
        self.hooked += 1

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack = self._stack()
            if not path:
                # a model that raised last time never left its modules
                stack.clear()
            stack.append((module, self._observer.enter(module, path, args, kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            stack = self._stack()
            while stack and stack[-1][0] is not module:
                # an exception was caught between a child and this module
                stack.pop()
            if stack:
                self._observer.leave(module, stack[-1][1], args, kwargs, result)
                stack.pop()

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _stack(self) -> list[tuple[nn.Module, str]]:
        try:
            return self._local.stack
        except AttributeError:
            self._local.stack = []
            return self._local.stack
