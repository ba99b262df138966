"""Monitor: the one entry point for watching a model that trains or generates."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from precision.config import read_json_object
from precision.debugger import PrecisionDebugger
from precision.errors import PrecisionError
from precision.interception import tensors_in
from precision.monitor.activations import ActivationHooks
from precision.monitor.alerts import Alert, Alerts
from precision.monitor.collector import Collector
from precision.monitor.config import MonitorConfig, make_monitor_config
from precision.monitor.console import Console
from precision.monitor.generation import add_generation, loss_in, tokens_in
from precision.monitor.results import Results
from precision.monitor.targets import StructRecorder, unwrap, watched
from precision.monitor.weights import OptimizerSteps, Parameters


class Monitor:
    """Writes figures of activations, gradients, weights and the optimizer's moments for each step.

    ::

        with Monitor("monitor.json").watch(model, optimizer) as monitor:
            for batch in batches:
                model(batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    A step ends with the optimizer's step; without an optimizer it ends with each forward pass that has no gradients (a
    token of a generation), or with step(). Files: <output_dir>/<date>-rank<R>-<id>/<kind>_<first>-<last>.csv, in
    msprobe's layout; alerts.csv; monitor.html. Steps shorter than a second are written together, once a second.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        debugger: PrecisionDebugger | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            config_path: a JSON file with the keys of MonitorConfig; it is read again when it changes.
            output_dir: where the run's folder is made; $MONITOR_OUTPUT_DIR or ./monitor_output without it.
            debugger: what dumps the step after an alert; one that dumps modules (level L0) to <run's folder>/dump
                without it.
            quiet: keep notes and the summary from stderr.
            options: fields of MonitorConfig; they override the file's.

        Raises:
            PrecisionError: for an unknown key or value; the message lists those there are.
        """
        self._path = Path(config_path) if config_path is not None else None
        self._options = options
        self._output_dir = output_dir
        self._console = Console(quiet)
        self._debugger = debugger
        self._file_state = self._state_of_file()
        self.config = self._read()
        self._results: Results | None = None
        self._models: list[nn.Module] = []
        self._optimizer: Any = None
        self._optimizer_steps: OptimizerSteps | None = None
        self._grad_acc_steps = 1
        self._step = 0
        self._handles: list[RemovableHandle] = []
        self._activations: list[ActivationHooks] = []
        self._parameters: Parameters | None = None
        self._struct: StructRecorder | None = None
        self._stance: contextlib.ExitStack = contextlib.ExitStack()
        self._tokens = 0
        self._clock = time.perf_counter()
        self._hooked = 0
        self._ran_checked = False
        self._on_before_pass = False
        self._collecting = False

    def watch(
        self,
        model: nn.Module | list[nn.Module],
        optimizer: Any = None,
        *,
        grad_acc_steps: int = 1,
        start_iteration: int = 0,
    ) -> Monitor:
        """Begin; to be left with close(), or used in a with statement.

        Args:
            model: the model, wrapped for data parallelism or not; a list for the stages of a virtual pipeline.
            optimizer: whose steps are the steps; a torch optimizer or one that wraps it (DeepSpeed's engine.optimizer).
            grad_acc_steps: forward and backward passes per step.
            start_iteration: number of the first step.

        Raises:
            PrecisionError: for a target that the model doesn't have, a folder that can't be written, figures of an
                optimizer that wasn't given.
        """
        if self._models:
            raise PrecisionError("the monitor watches a model already; close() it first")
        models = [unwrap(stage) for stage in (model if isinstance(model, (list, tuple)) else [model])]
        needs_optimizer = [key for key in ("mv_distribution", "param_distribution") if getattr(self.config, key)]
        if optimizer is None and needs_optimizer:
            raise PrecisionError(f"{', '.join(needs_optimizer)} needs the optimizer: watch(model, optimizer)")
        if grad_acc_steps < 1:
            raise PrecisionError(f"grad_acc_steps is {grad_acc_steps}; it must be 1 or more")
        _check_targets(models, self.config)
        rank = _rank()
        self._grad_acc_steps, self._step, self._optimizer = grad_acc_steps, start_iteration, optimizer
        self._collector = Collector(self.config.ops, self.config.eps)
        if self.config.module_ranks and rank not in self.config.module_ranks:
            self._console.note(f"nothing is collected on rank {rank}: module_ranks is {self.config.module_ranks}")
            return self
        sharded = Parameters(models, self._collector).sharded()
        if sharded and self.config.module_ranks and (self.config.wg_distribution or self.config.mv_distribution):
            raise PrecisionError(
                "gradients and moments that DeepSpeed shards are read by all ranks together; leave module_ranks empty"
            )
        self._results = Results(self.config, self._output_dir, rank, models, self._debugger, self._console)
        self._models = models
        if optimizer is not None:
            self._optimizer_steps = OptimizerSteps(optimizer, self._before_optimizer, self._after_optimizer)
        self._attach()
        return self

    def loss(self, value: float | torch.Tensor) -> None:
        """Record the step's loss, where the model's result doesn't hold one."""
        if not self._models or not self._collector.on:
            return
        if isinstance(value, torch.Tensor):
            self._collector.add_values("loss", ["loss"], value.detach().reshape(1))
        else:
            self._collector.add_scalar("loss", "loss", float(value))

    def step(self) -> None:
        """End a step; only for a training loop whose optimizer wasn't given."""
        if self._optimizer is not None:
            raise PrecisionError("the optimizer's steps are the steps; call step() only where watch() got no optimizer")
        if self._models:
            self._end_backward()
            if self._collector.on and self.config.wg_distribution and self._parameters is not None:
                self._parameters.add_gradients()
            self._end_step()

    def close(self) -> list[str]:
        """Take every hook off, write what is left and the page; returns the summary, which is printed as well."""
        if self._results is None or not self._models:
            return self.notes
        self._detach()
        if self._optimizer_steps is not None:
            self._optimizer_steps.remove()
            self._optimizer_steps = None
        self._models = []
        lines = self._results.close()
        self._console.show(lines)
        return lines

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def notes(self) -> list[str]:
        """What went otherwise than one may expect."""
        return self._console.notes

    @property
    def alerts(self) -> list[Alert]:
        """What the rules found, of the last run."""
        return self._results.alerts if self._results is not None else []

    @property
    def folder(self) -> Path | None:
        """Where the last run's figures are."""
        return self._results.folder if self._results is not None else None

    # the hooks

    def _attach(self) -> None:
        """Hook what is collected. A model's own hooks are its first before a call and its last after it."""
        config = self.config
        self._collecting = config.dynamic_on and not config.over(self._step)
        assert self._results is not None
        self._collector = Collector(self._results.needs, config.eps)
        self._parameters = Parameters(self._models, self._collector)
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._before_pass, with_kwargs=True))
        inner = False
        if self._collecting:
            for stage, sides in enumerate(_sides(self._models, config)):
                self._activations.append(ActivationHooks(self._models[stage], sides, self._collector, stage))
                self._hooked += len(sides)
                inner |= any(sides)
            if config.wg_distribution:
                self._handles += self._parameters.watch_gradients(self._grad_acc_steps)
            if config.print_struct:
                self._struct = StructRecorder(self._models[0])
        for model in self._models:
            self._handles.append(model.register_forward_hook(self._after_pass))
        if inner and "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # compiled code doesn't call the hooks of what it has inlined
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for hooks in self._activations:
            hooks.remove()
        self._handles, self._activations, self._hooked = [], [], 0
        if self._struct is not None:
            self._struct.close()
            self._struct = None
        self._stance.close()
        self._collector.on = False
        self._collector.drop()

    def _before_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collector = self._collector
        self._on_before_pass = collector.on
        collector.on = self._collecting and self.config.collects(self._step)
        if self._optimizer is not None and not torch.is_grad_enabled() and not self.config.generation:
            # an evaluation between training steps
            collector.on = False
        if module is self._models[0] and collector.on:
            self._end_backward()
            collector.passes += 1
            collector.micro_step += 1
            if self.config.generation:
                self._tokens += tokens_in(args, kwargs)

    def _after_pass(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        collector = self._collector
        if self._struct is not None:
            self._console.show(self._struct.text().splitlines())
            self._struct.close()
            self._struct = None
        if collector.on:
            if self.config.generation:
                with torch.no_grad():
                    add_generation(collector, result)
            loss = loss_in(result)
            if loss is not None:
                collector.add_values("loss", ["loss"], loss)
        if self._optimizer is not None:
            if not collector.on:
                collector.on = self._on_before_pass
        elif module is self._models[-1] and not any(tensor.requires_grad for tensor in tensors_in(result)):
            self._end_step()

    def _before_optimizer(self) -> None:
        if not self._collector.on or self._parameters is None:
            return
        self._end_backward()
        if self.config.wg_distribution:
            self._parameters.add_gradients()
        if self.config.param_distribution:
            self._parameters.add_values("param_origin")

    def _after_optimizer(self) -> None:
        if self._collector.on and self._parameters is not None:
            if self.config.mv_distribution:
                self._parameters.add_states(self._optimizer)
            if self.config.param_distribution:
                self._parameters.add_values("param_updated")
        self._end_step()

    def _end_backward(self) -> None:
        for hooks in self._activations:
            hooks.end_pass()

    # the steps

    def _end_step(self) -> None:
        assert self._results is not None
        self._results.stop_dump()
        if self._collector.on:
            if self.config.generation:
                now = time.perf_counter()
                self._collector.add_scalar("generation", "tokens_per_second", self._tokens / (now - self._clock))
            self._results.add(self._collector.send(self._step))
            self._check_ran()
        self._results.write_ready(self._step + 1)
        self._collector.on = False
        self._tokens = 0
        self._clock = time.perf_counter()
        self._step += 1
        self._reconfigure()

    def _check_ran(self) -> None:
        if self._ran_checked or not self._activations:
            return
        self._ran_checked = True
        unseen = [name for hooks in self._activations for name in hooks.names if name not in hooks.ran]
        if unseen:
            shown = ", ".join(unseen[:4]) + (", ..." if len(unseen) > 4 else "")
            self._console.note(
                f"{len(unseen)} of {self._hooked} watched modules weren't called in step {self._step} ({shown}); "
                "inside compiled graphs and fused kernels they can't be seen: run the model eagerly to watch them"
            )

    # the configuration

    def _read(self) -> MonitorConfig:
        config = make_monitor_config({**(read_json_object(self._path) if self._path else {}), **self._options})
        # refuses a rule that there isn't
        Alerts(config.alert.rules, 0)
        return config

    def _state_of_file(self) -> tuple[int, int] | None:
        try:
            state = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return (state.st_mtime_ns, state.st_size) if state is not None else None

    def _reconfigure(self) -> None:
        """Between two steps: take over an edited config file, and stop when all steps are collected."""
        state = self._state_of_file()
        if state is not None and state != self._file_state:
            self._file_state = state
            try:
                config = self._read()
                _check_targets(self._models, config)
            except PrecisionError as error:
                self._console.note(f"the edited config isn't used, the earlier one stays: {error}")
                return
            if config != self.config:
                self._take_over(config)
        elif self._collecting and self.config.over(self._step):
            self._detach()
            self._attach()

    def _take_over(self, config: MonitorConfig) -> None:
        assert self._results is not None
        self.config = config
        self._detach()
        self._results.take_over(config)
        self._ran_checked = False
        self._attach()
        self._console.note(
            f"step {self._step}: the edited config is in force, collecting is {'on' if self._collecting else 'off'}"
        )


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def _sides(models: list[nn.Module], config: MonitorConfig) -> list[dict[str, dict[str, str]]]:
    """For each stage what is watched; a target may belong to any of the stages."""
    result = []
    for model in models:
        names = {name for name, _ in model.named_modules()}
        here = {name: target for name, target in config.targets.items() if name in names}
        result.append(watched(model, config.model_copy(update={"targets": here}) if len(models) > 1 else config))
    return result


def _check_targets(models: list[nn.Module], config: MonitorConfig) -> None:
    everywhere = {name for model in models for name, _ in model.named_modules()}
    for name in config.targets:
        if name not in everywhere:
            watched(models[0], config)
    _sides(models, config)
