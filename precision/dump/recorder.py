"""Turns API and module calls into the records of a dump."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch import Tensor, nn

from precision.config import Config
from precision.dump import store
from precision.dump.call_stacks import StackTable, current_stack
from precision.dump.describe import as_sequence, describe, strict_number
from precision.dump.host_statistics import why_not
from precision.dump.selection import Selection
from precision.dump.statistics import Measured, StatisticsBatch
from precision.dump.summary import Summary
from precision.dump.tensor_files import TensorFiles, raise_failure
from precision.errors import PrecisionError
from precision.gradients import CallGradients, edges
from precision.interception import tensors_in
from precision.module_hooks import RunningModules
from precision.names import Api


class Recorder:
    """Observes APIs and modules (see interception and module_hooks) and keeps what the config asks for.

    Attributes:
        summary: what was seen, recorded and left out, and why.
        active: whether calls are recorded right now.
    """

    hooks_modules = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.summary = Summary()
        self.active = False
        self._selection = Selection(config)
        self._statistics = StatisticsBatch(checksum=config.summary_mode == "md5")
        self._files = TensorFiles(compress=self.config.compress)
        self._lock = threading.RLock()
        self._modules: RunningModules | None = None
        self._handles: list[Any] = []
        self._gradients: list[CallGradients] = []
        self._thread = threading.get_ident()
        self._folder: Path | None = None
        self._step_started = False
        self._clear_step()

    def begin(self, folder: Path, modules: RunningModules | None) -> None:
        """Record from now on, into a step's folder."""
        if not self._step_started:
            store.prepare(folder, tensors=self.config.task == "tensor" or bool(self.config.tensor_list))
            self._step_started = True
        self._folder = folder
        self._modules = modules
        self._thread = threading.get_ident()
        self.active = True

    def end(self) -> None:
        """Stop recording and write what there is of the step.

        Raises:
            PrecisionError: when the records or, unless on_write_error is "continue", the tensors can't be written.
        """
        for gradients in self._gradients:
            gradients.finish()
        self._gradients = []
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with self._lock, torch._C.DisableTorchFunction():
            self._statistics.flush()
            self._files.finish()
            self._fill_figures()
            self._write()
        self._modules = None
        self.summary.files(self._files)
        missing = why_not() if self.config.task != "structure" else None
        if missing is not None:
            self.summary.note(f"statistics on the host are slow: {missing}")
        if self.config.on_write_error == "stop":
            raise_failure(self._files)

    def next_step(self) -> None:
        """Forget the step's records: call numbers start at 0 again."""
        self._step_started = False
        self._selection.new_step()
        self._clear_step()

    # what interception.ApiInterception calls

    def call(self, api: Api, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an API and record it."""
        if not self.active or not self._token_selected():
            return self._run(api, function, args, kwargs)
        if not api.wanted(self.config.risk_level):
            self.summary.skip("outside risk_level", api.key)
            return self._run(api, function, args, kwargs)
        number = self._counts[api.key]
        enclosing = self._modules.running if self._modules else []
        name = f"{api.key}.{number}"
        record = f"{name}.forward"
        self.summary.seen += 1
        if not self._selection.record(record, enclosing):
            self.summary.skip("outside list or scope", api.key)
            result = self._run(api, function, args, kwargs)
            self._counts[api.key] += 1
            return result
        entry = self._inputs(record, args, kwargs)
        inputs = list(tensors_in((args, kwargs)))
        before = self._edges(inputs)
        result = self._run(api, function, args, kwargs)
        self._counts[api.key] += 1
        outputs = list(tensors_in(result))
        if not inputs and not outputs:
            self.summary.skip("no tensor in it", api.key)
            return result
        self._complete(record, entry, result, enclosing[-1] if enclosing else None)
        if before is not None:
            self._follow_gradients(f"{name}.backward", before, outputs)
        return result

    def _run(self, api: Api, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if api.key.startswith("Distributed."):
            # a collective writes to its arguments and leaves their version counters as they are
            with self._lock:
                for tensor in tensors_in((args, kwargs)):
                    self._statistics.forget(tensor)
                    self._files.forget(tensor)
        return result

    # what module_hooks.ModuleHooks calls

    def enter(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A module is about to run."""
        if not path:
            self._token += 1
            return ""
        if threading.get_ident() != self._thread:
            self.summary.other_threads += 1
        key = f"Module.{path}.{type(module).__name__}"
        with self._lock:
            number = self._counts[key]
            self._counts[key] += 1
        record = f"{key}.forward.{number}"
        self.summary.modules.add(path)
        if not self._records_modules():
            return record
        self.summary.seen += 1
        enclosing = self._modules.running if self._modules else []
        if not self._selection.record(record, enclosing):
            self.summary.skip("outside list or scope", key)
            return record
        with self._lock, torch._C.DisableTorchFunction():
            entry = self._inputs(record, args, kwargs)
            inputs = list(tensors_in((args, kwargs)))
            self._open[record] = (entry, self._edges(inputs), enclosing[-1] if enclosing else None)
        return record

    def leave(self, module: nn.Module, record: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A module has run."""
        self._selection.leave(record)
        opened = self._open.pop(record, None)
        if opened is None or not self.active:
            return
        entry, before, parent = opened
        with self._lock, torch._C.DisableTorchFunction():
            own = dict(module.named_parameters(recurse=False))
            if own and self._selection.forward and self._selection.inputs:
                entry["parameters"] = {
                    name: self._tensor(parameter, record, f"parameters.{name}") for name, parameter in own.items()
                }
            self._complete(record, entry, result, parent)
            if before is not None:
                backward = record.replace(".forward.", ".backward.")
                self._follow_gradients(backward, before, list(tensors_in(result)))
                self._follow_parameters(record.replace(".forward.", ".parameters_grad."), own)

    def _records_modules(self) -> bool:
        return self.active and self.config.level in ("L0", "mix") and self._token_selected()

    def _token_selected(self) -> bool:
        return self.config.token_range is None or self._selection.token(self._token)

    # building a record

    def _inputs(self, record: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not (self._selection.forward and self._selection.inputs):
            return {}
        return {
            "input_args": [describe(value, f"input.{i}", self._describer(record)) for i, value in enumerate(args)],
            "input_kwargs": {
                key: describe(value, f"input.{key}", self._describer(record)) for key, value in kwargs.items()
            },
        }

    def _complete(self, record: str, entry: dict[str, Any], result: Any, parent: str | None) -> None:
        if self.config.on_write_error == "stop":
            raise_failure(self._files)
        if self._selection.forward and self._selection.outputs:
            describer = self._describer(record)
            entry["output"] = [
                describe(value, f"output.{index}", describer) for index, value in enumerate(as_sequence(result))
            ]
        if entry:
            self._keep(record, entry, parent)

    def _keep(self, record: str, entry: dict[str, Any], parent: str | None) -> None:
        self._data[record] = entry
        self._parents[record] = parent
        self.summary.record(record)
        if self.config.extra_info:
            self._stacks.add(record, current_stack())

    def _describer(self, record: str) -> Callable[[Tensor, str], Any]:
        return lambda tensor, place: self._tensor(tensor, record, place)

    def _tensor(self, tensor: Tensor, record: str, place: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        if self.config.task == "structure":
            return entry
        entry.update(Max=None, Min=None, Mean=None, Norm=None, requires_grad=tensor.requires_grad)
        try:
            with self._lock:
                self._figures.append((entry, self._statistics.measure(tensor)))
                if self._selection.saves_tensors(record):
                    self._save(tensor, entry, f"{record}.{place}")
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            # an exotic tensor must not stop the model: the summary names it
            self.summary.skip(f"unreadable tensor ({str(error).splitlines()[0][:80]})", f"{record}.{place}")
        return entry

    def _save(self, tensor: Tensor, entry: dict[str, Any], name: str) -> None:
        assert self._folder is not None
        folder = self._folder / store.TENSOR_FOLDER
        entry["data_name"] = f"{name}.pt"
        self._files.save(tensor, folder / entry["data_name"])

    # backward

    def _edges(self, inputs: list[Tensor]) -> list[Any] | None:
        if not self._selection.backward or not torch.is_grad_enabled():
            return None
        return edges(inputs)

    def _follow_gradients(self, record: str, before: list[Any], outputs: list[Tensor]) -> None:
        parent = self._parents.get(record.replace(".backward", ".forward"))
        differentiable = {place: index for index, place in enumerate(p for p, edge in enumerate(before) if edge)}
        sides: dict[str, list[Any]] = {"input": [None] * len(outputs), "output": [None] * len(differentiable)}

        def report(side: str, place: int, gradient: Tensor) -> None:
            wanted = self._selection.inputs if side == "input" else self._selection.outputs
            if not self.active or not wanted:
                return
            with self._lock, torch._C.DisableTorchFunction():
                sides[side][place] = self._tensor(gradient, record, f"{side}.{place}")
                if record not in self._data:
                    self._keep(record, sides, None if parent is None else parent.replace(".forward", ".backward"))

        self._gradients.append(
            CallGradients(
                before,
                outputs,
                lambda place, gradient: report("input", place, gradient),
                lambda place, gradient: report("output", differentiable[place], gradient),
                self._handles,
            )
        )

    def _follow_parameters(self, record: str, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._followed:
                self._followed.add(id(parameter))
                hook = self._parameter_hook(record, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _parameter_hook(self, record: str, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self.active or parameter.grad is None:
                return
            with self._lock, torch._C.DisableTorchFunction():
                entry = self._data.get(record, {})
                entry[name] = [self._tensor(parameter.grad, record, name)]
                if record not in self._data:
                    self._keep(record, entry, None)

        return hook

    # a step's end

    def _clear_step(self) -> None:
        self._data: dict[str, Any] = {}
        self._parents: dict[str, str | None] = {}
        self._stacks = StackTable()
        self._counts: Counter[str] = Counter()
        self._figures: list[tuple[dict[str, Any], Measured]] = []
        self._open: dict[str, tuple[dict[str, Any], list[Any] | None, str | None]] = {}
        self._followed: set[int] = set()
        self._token = -1

    def _fill_figures(self) -> None:
        for entry, measured in self._figures:
            entry["Max"], entry["Min"] = strict_number(measured.max), strict_number(measured.min)
            entry["Mean"], entry["Norm"] = strict_number(measured.mean), strict_number(measured.norm)
            if measured.nan_count or measured.inf_count:
                entry["nan_count"], entry["inf_count"] = measured.nan_count, measured.inf_count
                self.summary.not_finite += 1
            if measured.crc is not None:
                entry["md5"] = measured.crc
            if entry.get("data_name") in self._files.failed:
                del entry["data_name"]
        self._figures = []

    def _write(self) -> None:
        assert self._folder is not None
        if not self._data:
            self.summary.empty = True
        tensors = self._folder / store.TENSOR_FOLDER
        dump = {
            "task": self.config.task,
            "level": self.config.level,
            "framework": "pytorch",
            "dump_data_dir": str(tensors) if tensors.is_dir() else None,
            "data": self._data,
        }
        stacks = self._stacks.as_json() if self.config.extra_info else None
        store.write_step(self._folder, dump, stacks, self._parents)


def check_task(config: Config) -> None:
    """Raise PrecisionError for combinations that make no dump."""
    if config.task == "structure" and config.summary_mode == "md5":
        raise PrecisionError("task 'structure' reads no tensor: summary_mode md5 needs task 'statistics' or 'tensor'")
