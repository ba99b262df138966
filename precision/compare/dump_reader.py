"""Reading dumps, ours and msprobe's: which tensors there are, where each stands in the model, and their values."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor

from precision.errors import PrecisionError
from precision.names import RecordName, parse_record

_RANK_FOLDER = re.compile(r"^(?:rank|proc|pid)(\d*)$")


class Address(NamedTuple):
    """Where a record stands in the model, free of a framework's naming.

    Attributes:
        path: dotted name of the module, or of the module that an API runs in ("" where that is unknown).
        call: the module's call number in its step.
        api: canonical API name, or "" for the module itself.
        number: place among the equal APIs of this module call.
        direction: forward, backward or parameters_grad.
    """

    path: str
    call: int
    api: str
    number: int
    direction: str

    def __str__(self) -> str:
        suffix = f"#{self.number}" if self.number else ""
        return f"{self.path}/{self.api}{suffix}" if self.api else self.path


@dataclass
class TensorEntry:
    """One tensor of a record.

    Attributes:
        record: name in the dump; place: such as "input.0".
        meta: its JSON form.
        file: where its values are, or None.
    """

    record: str
    place: str
    meta: dict[str, Any]
    file: Path | None
    address: Address

    @property
    def name(self) -> str:
        return f"{self.record}.{self.place}"

    @property
    def shape(self) -> list[int]:
        return list(self.meta.get("shape") or [])

    @property
    def dtype(self) -> str:
        return str(self.meta.get("dtype", "")).replace("torch.", "").lower()

    def load(self) -> Tensor:
        """The values.

        Raises:
            PrecisionError: for a file that can't be read as a tensor.
        """
        assert self.file is not None
        try:
            value = torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load has no error type of its own for damaged files
            raise PrecisionError(f"{self.file} can't be read as a tensor ({str(error).splitlines()[0]})") from error
        if not isinstance(value, Tensor):
            raise PrecisionError(f"{self.file} holds a {type(value).__name__}, not a tensor")
        return value.detach()


@dataclass
class Dump:
    """One process's dump of one step.

    Attributes:
        path: of dump.json.
        records: in the order in which they were recorded: name, address, tensors.
    """

    path: Path
    records: list[tuple[str, Address, list[TensorEntry]]] = field(default_factory=list)
    has_modules: bool = False
    unknown: list[str] = field(default_factory=list)


def read_dump(path: Path) -> Dump:
    """Read one dump.json and what lies beside it.

    Raises:
        PrecisionError: when it isn't there or isn't a dump.
    """
    content = _read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
        raise PrecisionError(f"{path} is not a dump: it has no object 'data'")
    construct = path.with_name("construct.json")
    parents = _read_json(construct) if construct.is_file() else {}
    folder = path.with_name("dump_tensor_data")
    dump = Dump(path, has_modules=any(parents.values()))
    counts: Counter[tuple[str, int, str, str]] = Counter()
    for record, entry in content["data"].items():
        parsed = parse_record(record)
        if parsed is None or not isinstance(entry, dict):
            dump.unknown.append(record)
            continue
        address = _address(record, parsed, parents, counts)
        tensors = [
            TensorEntry(record, place, meta, _file(folder, record, place, meta), address)
            for place, meta in _tensors(entry, parsed)
        ]
        dump.records.append((record, address, tensors))
    return dump


def find_dumps(path: Path) -> dict[str, dict[int, Path]]:
    """The dump.json files under a path, by step folder's name and rank.

    Args:
        path: a dump.json, a rank's folder, a step's folder, or the folder of the steps.

    Raises:
        PrecisionError: when there is none.
    """
    if path.is_file():
        return {"": {_rank(path.parent): path}}
    if (path / "dump.json").is_file():
        return {"": {_rank(path): path / "dump.json"}}
    steps = {step.name: _ranks(step) for step in sorted(path.glob("step*"), key=_number) if _ranks(step)}
    if not steps and _ranks(path):
        steps = {"": _ranks(path)}
    if not steps:
        raise PrecisionError(f"no dump.json under {path}; give a dump.json, a rank's, a step's or the dump's folder")
    return steps


def _ranks(step: Path) -> dict[int, Path]:
    found = {}
    for folder in sorted(step.iterdir()) if step.is_dir() else []:
        if _RANK_FOLDER.match(folder.name) and (folder / "dump.json").is_file():
            found[_rank(folder)] = folder / "dump.json"
    return found


def _rank(folder: Path) -> int:
    match = _RANK_FOLDER.match(folder.name)
    # proc<PID> and pid<PID> are single processes
    return int(match[1]) if match and match[1] and folder.name.startswith("rank") else 0


def _number(folder: Path) -> int:
    digits = re.sub(r"\D", "", folder.name)
    return int(digits) if digits else 0


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrecisionError(f"{path} can't be read ({error.strerror})") from error
    except ValueError as error:
        raise PrecisionError(f"{path} is not JSON ({error})") from error


def _address(
    record: str, parsed: RecordName, parents: dict[str, str | None], counts: Counter[tuple[str, int, str, str]]
) -> Address:
    if parsed.is_module:
        return Address(_module_path(parsed.name), parsed.call, "", 0, parsed.direction)
    parent = parse_record(parents.get(record) or "")
    path, call = (_module_path(parent.name), parent.call) if parent else ("", 0)
    api, direction = parsed.canonical
    key = (path, call, api, direction)
    counts[key] += 1
    # an API's backward runs in the opposite order: its call number says which forward it belongs to
    index = counts[key] - 1 if direction == "forward" or not parent else parsed.call
    return Address(path, call, api, index, direction)


def _module_path(name: str) -> str:
    # the last part is the class
    return name.rpartition(".")[0] or name


def _tensors(entry: dict[str, Any], parsed: RecordName) -> Iterator[tuple[str, dict[str, Any]]]:
    if parsed.direction == "parameters_grad":
        for name, value in entry.items():
            yield from ((name, meta) for _, meta in _flatten(value, name))
        return
    for key, place in (("input_args", "input"), ("input", "input"), ("input_kwargs", "input")):
        yield from _flatten(entry.get(key), place)
    yield from _flatten(entry.get("parameters"), "parameters")
    yield from _flatten(entry.get("output"), "output")


def _flatten(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from _flatten(part, f"{place}.{index}")
    elif isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            yield place, value
        elif "type" not in value or "value" not in value:
            for name, part in value.items():
                yield from _flatten(part, f"{place}.{name}")


def _file(folder: Path, record: str, place: str, meta: dict[str, Any]) -> Path | None:
    name = meta.get("data_name")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    return folder / name if (folder / name).is_file() else None
