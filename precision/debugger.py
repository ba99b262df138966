"""PrecisionDebugger: the one entry point of the precision tools."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

import torch
from torch import nn

from precision.config import Config, make_config, read_config_file
from precision.dump import store
from precision.dump.recorder import Recorder, check_task
from precision.dump.summary import Summary
from precision.errors import PrecisionError
from precision.free_benchmark.checker import Checker
from precision.free_benchmark.config import FreeBenchmarkConfig
from precision.free_benchmark.summary import Summary as CheckSummary
from precision.graph import GraphRuns
from precision.interception import COLLECTIVES, ApiInterception, Registry
from precision.module_hooks import ModuleHooks
from precision.torchair_dump import set_dump_options

# modes of the older configure_hook()
_HOOK_MODES: dict[str, dict[str, Any]] = {
    "api_stack": {"level": "L1"},
    "all": {"level": "L1"},
    "list": {"level": "L1"},
    "range": {"level": "L1"},
    "module": {"level": "L0"},
    "mix": {"level": "mix"},
}


class PrecisionDebugger:
    """Dumps what goes into and comes out of the modules and APIs of any nn.Module.

    ::

        debugger = PrecisionDebugger(dump_path="dump", level="mix")
        for batch in batches:
            with debugger.start(model):
                model(batch)
            debugger.step()

    Writes <dump_path>/step<N>/rank<R>/{dump,stack,construct}.json (the folder is "rank" without a process group), in
    msprobe's layout. Compiled functions run as plain Python meanwhile, where torch can do that (2.6 and newer), so no
    record is lost and nothing is compiled again; level "graph" dumps compiled graphs (see compile_backend).
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        *,
        hook_name: str | None = None,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            config_path: a config.json in msprobe's layout.
            hook_name: "dump" or "free_benchmark" (the task of that name), for callers of the older spelling.
            quiet: keep the summary of stop() from stderr; stop() returns it in any case.
            options: fields of precision.Config; they override the file's.

        Raises:
            PrecisionError: for an unknown key or value; the message lists those there are.
        """
        if hook_name not in (None, "dump", "free_benchmark"):
            raise PrecisionError(f"no hook {hook_name!r}; there are 'dump' and 'free_benchmark'")
        values = read_config_file(config_path) if config_path is not None else {}
        self._values: dict[str, Any] = {**values, **{key: value for key, value in options.items() if value is not None}}
        if hook_name == "free_benchmark":
            self._values["task"] = "free_benchmark"
        self._quiet = quiet
        self._step = 0
        self._running: contextlib.ExitStack | None = None
        self._registry = Registry()
        self._graphs = GraphRuns()
        if torch.distributed.is_available():
            self._registry.add(torch.distributed, COLLECTIVES, "Distributed")
        self._configure()

    @property
    def config(self) -> Config:
        """The options in force."""
        return self._recorder.config

    @property
    def summary(self) -> Summary | CheckSummary:
        """What was hooked, recorded and left out so far, and why."""
        return self._recorder.summary

    @property
    def folder(self) -> Path:
        """Where the current step's dump goes."""
        return self.config.dump_path / f"step{self._step}" / store.rank_folder()

    def configure_hook(
        self, mode: str = "api_stack", *, scope: list[str] | None = None, summary_only: bool = False
    ) -> None:
        """The older spelling of the options.

        Args:
            mode: "api_stack" or "all" (APIs), "list" (APIs named in scope), "range" (from scope[0] to scope[1]),
                "module", "mix".
            scope: names, for "list" and "range".
            summary_only: statistics instead of whole tensors.
        """
        if mode not in _HOOK_MODES:
            raise PrecisionError(f"no mode {mode!r}; there are {', '.join(_HOOK_MODES)}")
        if mode in ("list", "range") and not scope:
            raise PrecisionError(f"mode {mode!r} needs scope, the names of the records")
        self._values.update(_HOOK_MODES[mode], task="statistics" if summary_only else "tensor")
        if scope:
            self._values["scope" if mode == "range" else "list"] = scope
        self._configure()

    def register_api(self, owner: Any, attributes: Iterable[str] | dict[str, str], family: str = "NPU") -> None:
        """Let Python functions count as APIs: torch's modes see only torch's own.

        Args:
            owner: the module or object that callers look the functions up in; changed between start() and stop() only.
            attributes: their names, or a mapping from those to the names in the dump.
            family: first part of the names in the dump.
        """
        self._registry.add(owner, attributes, family)

    def compile_backend(self, inner: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
        """A backend for torch.compile whose graphs this debugger dumps at level "graph".

        While the debugger is started a graph is run node by node, otherwise by what `inner` makes of it; nothing is
        compiled again at start() or stop().
        """
        return self._graphs.backend(inner)

    def set_torchair_options(self, compiler_config: Any) -> None:
        """Let torchair's own dump follow this debugger's options, in the graphs compiled with this config from now on.

        For level "graph" on an NPU, instead of compile_backend: the device writes the nodes' tensors to
        <dump_path>/torchair whenever such a graph runs, whether the debugger is started or not.

        Args:
            compiler_config: a torchair.CompilerConfig with its mode set, before get_npu_backend is given it.

        Raises:
            PrecisionError: at another level or task, and for options that torchair's dump doesn't have.
        """
        if self.config.level != "graph" or isinstance(self._recorder, Checker):
            raise PrecisionError(
                "torchair dumps compiled graphs: make the debugger with level='graph' and no other task"
            )
        if self._rank_wanted():
            folder = set_dump_options(compiler_config, self.config)
            self._graphs.elsewhere = f"torchair dumps its graphs to {folder} whenever they run"

    def start(self, model: nn.Module | list[nn.Module] | None = None) -> PrecisionDebugger:
        """Record from here on; to be left with stop(), or used in a with statement.

        Args:
            model: needed for levels L0 and mix, for token_range, and for the modules' names in level L1.

        Raises:
            PrecisionError: when it runs already, needs a model, or dump_path can't be written.
        """
        if self._running is not None:
            raise PrecisionError("the debugger runs already; call stop() first")
        models = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
        if not models and (self.config.level in ("L0", "mix") or self.config.token_range is not None):
            raise PrecisionError("levels L0 and mix and token_range need the model: start(model)")
        with contextlib.ExitStack() as undo:
            if self._wanted_here():
                self._enter(models, undo)
            self._running = undo.pop_all()
        return self

    def stop(self) -> Summary | CheckSummary:
        """Take every hook off, write the dump, and say what was recorded and what was not.

        Raises:
            PrecisionError: when the dump couldn't be written.
        """
        running, self._running = self._running, None
        if running is not None:
            running.close()
            if not self._quiet:
                print("\n".join(f"precision: {line}" for line in self.summary.lines()), file=sys.stderr)
        return self.summary

    def step(self) -> None:
        """The next start() belongs to the next step; call numbers begin at 0 again."""
        if self._running is not None:
            raise PrecisionError("step() belongs between stop() and start()")
        self._recorder.next_step()
        self._step += 1

    def set_init_step(self, number: int) -> None:
        """Number the current step, as when a training run is resumed."""
        self._step = number

    def __enter__(self) -> PrecisionDebugger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configure(self) -> None:
        if self._running is not None:
            raise PrecisionError("the options can't be changed between start() and stop()")
        self._recorder: Recorder | Checker
        if self._values.get("task") == "free_benchmark":
            self._recorder = Checker(make_config(self._values, FreeBenchmarkConfig))
            return
        config = make_config(self._values, Config)
        check_task(config)
        self._recorder = Recorder(config)

    def _wanted_here(self) -> bool:
        if not self.config.dump_enable:
            self.summary.note("nothing is recorded: dump_enable is false")
            return False
        if not self._rank_wanted():
            return False
        if self.config.step and self._step not in self.config.step:
            self.summary.note(f"steps outside {self.config.step} are not recorded")
            return False
        return True

    def _rank_wanted(self) -> bool:
        rank = torch.distributed.get_rank() if store.rank_folder() != "rank" else 0
        if self.config.rank and rank not in self.config.rank:
            self.summary.note(f"nothing is recorded on rank {rank}: rank is {self.config.rank}")
            return False
        return True

    def _enter(self, models: list[nn.Module], undo: contextlib.ExitStack) -> None:
        if self.config.level == "graph":
            self._recorder.begin(self.folder, self._graphs)
            undo.callback(self._recorder.end)
            undo.enter_context(self._graphs.observed(self._recorder))
            undo.callback(lambda: self.summary.note(str(self._graphs)))
            return
        self.summary.functions = self._registry.show()
        undo.callback(self._registry.hide)
        hooks = None
        if models and self._recorder.hooks_modules:
            hooks = ModuleHooks(models, self._recorder)
            self.summary.hooked = hooks.hooked
        self._recorder.begin(self.folder, hooks)
        if isinstance(self._recorder, Checker):
            self._recorder.know_modules(models)
        undo.callback(self._recorder.end)
        if hooks is not None:
            undo.callback(hooks.remove)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        if self.config.level != "L0":
            undo.enter_context(ApiInterception(self._recorder))
