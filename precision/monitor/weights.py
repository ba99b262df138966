"""Weights, their gradients and the optimizer's moments, read where a training step has them."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precision.errors import PrecisionError
from precision.monitor.collector import Collector


class Parameters:
    """The parameters of the models by name, as they are measured."""

    def __init__(self, models: list[nn.Module], collector: Collector) -> None:
        self._collector = collector
        self._named = [
            (name, parameter, stage)
            for stage, model in enumerate(models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def watch_gradients(self, grad_acc_steps: int) -> list[RemovableHandle]:
        """Hooks that measure each gradient when the last backward pass has added to it, before any reduction."""

        def hook(name: str, stage: int) -> Callable[[Tensor], None]:
            def measure(parameter: Tensor) -> None:
                if self._collector.on and self._collector.micro_step >= grad_acc_steps - 1:
                    self._add("grad_unreduced", name, parameter.grad, stage)

            return measure

        return [
            parameter.register_post_accumulate_grad_hook(hook(name, stage)) for name, parameter, stage in self._named
        ]

    def add_gradients(self) -> None:
        """The gradients that the optimizer is about to use."""
        for name, parameter, stage in self._named:
            gradient = _deepspeed().safe_get_full_grad(parameter) if is_deepspeed(parameter) else parameter.grad
            self._add("grad_reduced", name, gradient, stage)

    def add_values(self, kind: str) -> None:
        """The weights as they are, under "param_origin" or "param_updated"."""
        for name, parameter, stage in self._named:
            self._add(kind, name, parameter, stage)

    def add_states(self, optimizer: Any) -> None:
        """The optimizer's states of a parameter's shape, each under its own name."""
        for name, parameter, stage in self._named:
            for key, state in _states(optimizer, parameter):
                self._add(key, name, state, stage)

    def sharded(self) -> bool:
        """Whether reading a gradient or a moment is something that all ranks do together."""
        return any(is_deepspeed(parameter) for _, parameter, _ in self._named)

    def _add(self, kind: str, name: str, tensor: Tensor | None, stage: int) -> None:
        if tensor is not None:
            # reductions over ranks, clipping and optimizers may write past the version counter, to .data
            self._collector.add(kind, name, tensor, 0, stage, tracked=False)


def is_deepspeed(parameter: Tensor) -> bool:
    """Whether DeepSpeed keeps gradient and moments of this parameter elsewhere, in shards."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _deepspeed() -> Any:
    return importlib.import_module("deepspeed.utils")


def _states(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    if is_deepspeed(parameter):
        for key in ("exp_avg", "exp_avg_sq"):
            yield key, _deepspeed().safe_get_full_optimizer_state(parameter, key)
        return
    for key, state in optimizer.state.get(parameter, {}).items():
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            yield key, state


class OptimizerSteps:
    """Calls before and after each step of an optimizer, torch's own or one that wraps it, until remove()."""

    def __init__(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        if not callable(getattr(optimizer, "step", None)):
            raise PrecisionError(
                f"the optimizer is a {type(optimizer).__name__} without step(); pass a torch optimizer"
            )
        self._handles: list[RemovableHandle] = []
        self._wrapped: Any = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self._handles = [
                optimizer.register_step_pre_hook(lambda *_: before()),
                optimizer.register_step_post_hook(lambda *_: after()),
            ]
            return
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            after()
            return result

        optimizer.step = step
        self._wrapped = optimizer

    def remove(self) -> None:
        """Put everything back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._wrapped is not None:
            del self._wrapped.step
            self._wrapped = None
