"""Call stacks of records, taken cheaply and put into words once, when they are written."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

Stack = tuple[tuple[CodeType, int], ...]
_HIDDEN = (str(Path(__file__).resolve().parent.parent),)
# torch's machinery between a module's call and its forward says nothing about the model
_MACHINERY = {
    str(Path(torch.__file__).parent / "nn" / "modules" / "module.py"),
    str(Path(torch.__file__).parent / "overrides.py"),
}


def current_stack() -> Stack:
    """The frames outside this package and torch's call machinery, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


class StackTable:
    """Records grouped by the stack they share."""

    def __init__(self) -> None:
        self._groups: dict[Stack, list[str]] = {}

    def add(self, record: str, stack: Stack) -> None:
        self._groups.setdefault(stack, []).append(record)

    def as_json(self) -> dict[str, list[list[str]]]:
        """msprobe's stack.json: group number to [names, frames]."""
        merged: dict[tuple[str, ...], list[str]] = {}
        for stack, records in self._groups.items():
            merged.setdefault(tuple(_words(stack)), []).extend(records)
        return {str(number): [records, list(words)] for number, (words, records) in enumerate(merged.items())}


def _words(stack: Stack) -> list[str]:
    lines = []
    for code, line in stack:
        name = code.co_filename
        if name in _MACHINERY or name.startswith(_HIDDEN):
            continue
        text = linecache.getline(name, line).strip()
        if "handle_torch_function(" not in text:
            lines.append(f"File {name}, line {line}, in {code.co_name}, \n {text}")
    return lines
