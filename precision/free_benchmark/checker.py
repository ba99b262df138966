"""The observer behind task "free_benchmark": chooses calls, has them run again, and keeps what came of it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import nn

from precision.dump.selection import Selection
from precision.free_benchmark import report
from precision.free_benchmark.backward import BackwardCheck
from precision.free_benchmark.config import FreeBenchmarkConfig
from precision.free_benchmark.examine import Examiner
from precision.free_benchmark.findings import NOT_CHECKED, Finding, Record, not_checked
from precision.free_benchmark.fix import Fixer
from precision.free_benchmark.pieces import piece_count
from precision.free_benchmark.preheat import Preheat
from precision.free_benchmark.rerun import Call, CannotRerunError, call_name
from precision.free_benchmark.rotation import Rotation
from precision.free_benchmark.summary import Summary
from precision.free_benchmark.where import ModulePaths
from precision.interception import tensors_in
from precision.module_hooks import RunningModules
from precision.names import Api

_CALL_NUMBER = re.compile(r"\.\d*(\.(forward|backward)?)?$")


class Checker:
    """Observes APIs (see interception) and checks or fixes what the config asks for.

    Attributes:
        summary: what was seen, checked and left out, and why.
        records: the current step's findings.
    """

    def __init__(self, config: FreeBenchmarkConfig) -> None:
        self.config = config
        self.summary = Summary()
        self.records: list[Record] = []
        self._examiner = Examiner(config)
        self._preheat = Preheat(config, self._examiner)
        self._fixer = Fixer(config)
        self._rotation = Rotation() if config.rotate else None
        self._selection = Selection(config)
        self._wanted: dict[Api, bool] = {}
        self._counts: Counter[str] = Counter()
        self._backward: list[BackwardCheck] = []
        self._modules: RunningModules | None = None
        self._paths = ModulePaths([])
        self._folder: Path | None = None
        self._rank = self._step = 0
        self._token = -1
        self._step_started = False
        self.active = False

    @property
    def hooks_modules(self) -> bool:
        """Whether modules have to be hooked: only to count the model's calls."""
        return self.config.token_range is not None

    def add_reference(self, key: str, function: Callable[..., Any]) -> None:
        """Let to_cpu hold an API, such as "NPU.npu_swiglu", against this function."""
        self._examiner.references[key] = function

    def begin(self, folder: Path, modules: RunningModules | None) -> None:
        """Check from now on, into a step's folder."""
        if not self._step_started:
            report.prepare(folder)
            self._step_started = True
        self._folder = folder
        self._modules = modules
        self._step = int(folder.parent.name.removeprefix("step"))
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self.active = True

    def know_modules(self, models: list[nn.Module]) -> None:
        """The models whose modules the report names."""
        self._paths = ModulePaths(models)

    def end(self) -> None:
        """Stop checking and write what there is of the step.

        Raises:
            PrecisionError: when the report can't be written.
        """
        assert self._folder is not None
        for check in self._backward:
            check.finish()
        self._backward = []
        self.active = False
        self.summary.unmatched = [entry for entry, count in self._selection.matched.items() if not count]
        self.summary.learned = len(self._preheat.raised)
        if self._rotation is not None:
            needed = self._rotation.steps_needed
            done = self._rotation.steps + 1
            self.summary.coverage = f"rotation: every call is checked within {needed} steps; {done} done"
        title = f"free-benchmark: {self.config.handler_type} {self.config.fuzz_stage}, {self.config.pert_mode}"
        report.write_step(self._folder, self.records, f"{title}, step {self._step}", self.summary.lines())
        self._modules = None

    def next_step(self) -> None:
        """Forget the step's findings: call numbers start at 0 again."""
        if self._step_started:
            self._preheat.next_step()
            if self._rotation is not None:
                self._rotation.next_step()
        self._step_started = False
        self._selection.new_step()
        self._examiner.next_step()
        self._counts.clear()
        self.records = []
        self._token = -1

    # what interception.ApiInterception calls

    def call(self, api: Api, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an API and check or replace its result."""
        wanted = self._wanted.get(api)
        if wanted is None:
            wanted = self._wanted[api] = self._may_match(api)
        if not wanted or not self.active:
            return function(*args, **kwargs)
        if next(iter(tensors_in((args, kwargs))), None) is None:
            self.summary.skip("no tensor among its inputs", api.key)
            return function(*args, **kwargs)
        number = self._counts[api.key]
        self._counts[api.key] = number + 1
        self.summary.seen += 1
        if not self._selected(f"{api.key}.{number}.forward"):
            self.summary.skip("outside list, scope or token_range", api.key)
            return function(*args, **kwargs)
        part = None
        if self._rotation is not None:
            turn = self._rotation.turn(self._rotation.key(api, args, kwargs), piece_count(call_name(api), args))
            if turn is None:
                return function(*args, **kwargs)
            part = turn
        name = f"{api.key}.{number}"
        try:
            call = Call(api, function, args, kwargs)
        except CannotRerunError as reason:
            self._keep(name, "forward", [not_checked(str(reason))])
            return function(*args, **kwargs)
        if self.config.handler_type == "fix":
            result, why_not = self._fixer.run(call, args, kwargs)
            if why_not:
                self._keep(name, "forward", [not_checked(why_not)])
            else:
                self.summary.replaced += 1
            return result
        if self.config.fuzz_stage == "backward":
            return self._watch_backward(name, call, args, kwargs)
        result = function(*args, **kwargs)
        with torch.no_grad():
            self._keep(name, "forward", self._examined(call, result, part))
        return result

    # what module_hooks.ModuleHooks calls

    def enter(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A module is about to run: calls of the model itself are counted."""
        if not path:
            self._token += 1
        return ""

    def leave(self, module: nn.Module, record: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A module has run."""

    def _may_match(self, api: Api) -> bool:
        if not api.wanted(self.config.risk_level):
            self.summary.skip("outside risk_level (counted once)", api.key)
            return False
        if not self.config.list:
            return True
        # an entry may end in a call number: Functional.softmax.3.forward
        return any(_CALL_NUMBER.sub("", entry) in api.key or entry in f"{api.key}." for entry in self.config.list)

    def _selected(self, record: str) -> bool:
        if self.config.token_range is not None and not self._selection.token(self._token):
            return False
        return self._selection.record(record, self._modules.running if self._modules else [])

    def _examined(self, call: Call, result: Any, part: int | None) -> list[Finding]:
        try:
            call.done()
            found = self._examiner.examine(call, result, part)
            self.summary.checked += 1
            return self._preheat.settle(call, result, found)
        except CannotRerunError as reason:
            return [not_checked(str(reason))]

    def _watch_backward(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check = BackwardCheck(call, self._examiner)
        result = call.function(*args, **kwargs)
        module = self._module()

        def keep(found: list[Finding]) -> None:
            self.summary.checked += any(finding.verdict != NOT_CHECKED for finding in found)
            self._keep(name, "backward", found, module)

        with self._unobserved():
            check.follow(list(tensors_in(result)), keep, self._unobserved)
        self._backward.append(check)
        return result

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        """What is called meanwhile, such as a second run inside a backward hook, is none of the model's calls."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def _keep(self, name: str, stage: str, found: list[Finding], module: str | None = None) -> None:
        module = self._module() if module is None else module
        for finding in found:
            record = Record(self._rank, self.config.pert_mode, stage, self._step, name, module, finding)
            self.records.append(record)
            self.summary.record(record)

    def _module(self) -> str:
        if self._modules is not None and self._modules.running:
            return self._modules.running[-1]
        return self._paths.current()
