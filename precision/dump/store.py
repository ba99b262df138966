"""One step's dump on disk: dump.json, stack.json, construct.json, complete or not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from precision.errors import PrecisionError
from precision.output import write_atomic

TENSOR_FOLDER = "dump_tensor_data"
# Set aside before a dump, so that its records can still be written when tensors have filled the disk.
RESERVE_BYTES = 8 << 20
_INFINITY = re.compile(r'(?<=": )(-?)Infinity')


def rank_folder() -> str:
    """What the folder of this process is called in a step's folder."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"rank{torch.distributed.get_rank()}"
    return "rank"


def prepare(folder: Path, *, tensors: bool) -> None:
    """Make the folder and see that it can be written.

    Raises:
        PrecisionError: when it can't, or holds a dump already.
    """
    if (folder / "dump.json").exists():
        raise PrecisionError(f"{folder} holds a dump already; choose another dump_path, or remove it first")
    try:
        (folder / TENSOR_FOLDER if tensors else folder).mkdir(parents=True, exist_ok=True)
        if tensors:
            (folder / ".reserve").write_bytes(b"\0" * RESERVE_BYTES)
        else:
            (folder / ".reserve").touch()
    except OSError as error:
        raise PrecisionError(
            f"dump_path can't be written: {folder} ({error.strerror or error}); choose another dump_path"
        ) from error


def write_step(folder: Path, dump: dict[str, Any], stacks: dict[str, Any] | None, parents: dict[str, Any]) -> None:
    """Write the step's JSON files; `stacks` None leaves out stack.json and construct.json.

    Raises:
        PrecisionError: when they can't be written.
    """
    try:
        (folder / ".reserve").unlink(missing_ok=True)
        head = {key: value for key, value in dump.items() if key != "data"}
        lines = [f"{json.dumps(name)}: {_strict_json(record)}" for name, record in dump["data"].items()]
        text = json.dumps(head)[:-1] + ', "data": {\n' + ",\n".join(lines) + "\n}}\n"
        write_atomic(folder / "dump.json", text)
        if stacks is not None:
            write_atomic(folder / "stack.json", json.dumps(stacks))
            write_atomic(folder / "construct.json", json.dumps(parents))
    except OSError as error:
        raise PrecisionError(f"the records can't be written to {folder} ({error.strerror or error})") from error


def _strict_json(record: Any) -> str:
    # JSON knows no infinity, but a number too large for a double is one to every reader, msprobe included
    text = json.dumps(record)
    return _INFINITY.sub(r"\g<1>1e999", text) if "Infinity" in text else text
