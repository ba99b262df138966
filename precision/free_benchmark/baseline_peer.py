"""msprobe's free-benchmark, which left it after release 8.3, as a second tool in the table of baseline.py.

Its pins must not touch this package's environment, so it goes into a folder of its own:

    pip install --target peer "mindstudio-probe==8.3.3" "numpy<2"
    PYTHONPATH=peer python -m precision.free_benchmark.baseline --peer
"""

from __future__ import annotations

import csv
import importlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from precision.errors import PrecisionError

# what it has no option for
_UNKNOWN = ("rotate",)
_UNKNOWN_MODES = ("round_mode", "condition")


def peer_config(options: dict[str, Any]) -> dict[str, Any] | None:
    """Its section for a setting of ours; None where it has no such setting."""
    mode = options.get("pert_mode", "improve_precision")
    backward = options.get("fuzz_stage") == "backward"
    if mode in _UNKNOWN_MODES or any(key in options for key in _UNKNOWN) or (backward and not options.get("list")):
        return None
    section = {"handler_type": "check", "fuzz_stage": "forward", "fuzz_level": "L1", "scope": [], "list": [], **options}
    return {**section, "pert_mode": mode, "fuzz_device": "cpu" if mode == "to_cpu" else "npu"}


def import_peer() -> Any:
    """Its debugger.

    Raises:
        PrecisionError: msprobe 8.3 isn't in this environment.
    """
    # it logs every call; 3 leaves errors
    os.environ.setdefault("MSPROBE_LOG_LEVEL", "3")
    try:
        # gone from later releases
        importlib.import_module("msprobe.pytorch.free_benchmark")
        return importlib.import_module("msprobe.pytorch").PrecisionDebugger
    except ImportError as error:
        hint = 'pip install --target peer mindstudio-probe==8.3.3 "numpy<2", then set PYTHONPATH=peer'
        raise PrecisionError(f"the peer can't be imported ({error}); {hint}") from error


class Peer:
    """One setting of the peer, used as ours is: start(model) in a with statement, then step().

    Without a process group it writes no row, so one of a single process is made where there is none.
    """

    def __init__(self, folder: Path, section: dict[str, Any]) -> None:
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._folder = folder
        config = {"task": "free_benchmark", "dump_path": str(folder), "rank": [], "step": [], "level": "L1"}
        path = folder / "config.json"
        path.write_text(json.dumps({**config, "free_benchmark": section}))
        debugger = import_peer()
        # a singleton: each setting needs a new one
        for kind in debugger.__mro__:
            if getattr(kind, "_instance", None) is not None:
                kind._instance = None
        self._tool = debugger(config_path=str(path))
        self._apis = self._tool.service.api_register

    def start(self, model: nn.Module) -> Peer:
        self._tool.start(model=model)
        self._apis.register_all_api()
        return self

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tool.stop()
        # it leaves torch's functions wrapped; plain steps, ours and its own next setting would run through them
        self._apis.restore_all_api()

    def step(self) -> None:
        self._tool.step()

    def flagged(self) -> int:
        """Rows it has written: one for each result that it flagged."""
        rows = 0
        for path in self._folder.rglob("free_benchmark.csv"):
            with open(path, newline="") as file:
                rows += sum(1 for _ in csv.DictReader(file))
        return rows
