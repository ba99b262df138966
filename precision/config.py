"""What a user may ask of the debugger: the keys of msprobe's config.json, checked before anything runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Dict, List, Literal, Optional, Tuple, Type, TypeVar, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from precision.errors import PrecisionError

Task = Literal["statistics", "tensor", "structure"]
Level = Literal["L0", "L1", "mix", "graph"]
RiskLevel = Literal["ALL", "FOCUS", "CORE"]
DataMode = Literal["all", "forward", "backward", "input", "output"]
SummaryMode = Literal["statistics", "md5"]
Precision = Literal["high", "low"]
OnWriteError = Literal["stop", "continue"]

# Values that msprobe knows and this debugger doesn't, and what does the same here.
_INSTEAD = {
    (
        "level",
        "L2",
    ): "kernels are recorded by the vendor's own dump; 'L1' records the APIs that start them, 'graph' nodes",
    ("level", "debug"): "single tensors are saved by torch.save, or by task 'statistics' with tensor_list",
    ("summary_mode", "xor"): "use 'md5', which adds a CRC-32 of each tensor's bytes",
    ("task", "overflow_check"): "use 'statistics', which counts nan_count and inf_count, or precision.monitor",
    ("task", "run_ut"): "use 'free_benchmark', which runs APIs again",
}

# the tasks of the debugger: those that dump, and the one with a Config of its own (free_benchmark/config.py)
TASKS = (*get_args(Task), "free_benchmark")
_TASK_KEYS = ("scope", "list", "data_mode", "summary_mode", "tensor_list")


class Config(BaseModel):
    """One validated set of options.

    Attributes:
        task: "statistics", "tensor" (statistics and whole tensors) or "structure" (names and call stacks only).
        level: "L0" modules, "L1" APIs, "mix" both, "graph" the nodes of compiled graphs.
        dump_path: folder for step<N>/rank<R>/.
        rank, step: numbers to dump, [] for all; "a-b" strings are ranges.
        scope: [] or the names of the first and the last record.
        list: names or parts of names; in mix a module that matches brings what runs inside it.
        data_mode: what of each record is kept.
        summary_mode: "md5" adds a CRC-32 of each tensor's bytes under the key md5, as msprobe does.
        tensor_list: parts of names whose tensors are saved as well, task statistics.
        token_range: [first, last] of the model's calls in each step (0 is the prefill); None for all.
        risk_level: "ALL" brings in views, casts and shape operations, "CORE" keeps matmuls, norms and attention.
        extra_info: whether stack.json and construct.json are written.
        on_write_error: when a tensor can't be written (disk full): "stop" raises at the next call, "continue" goes on
            without saving tensors.
        compress: tensor files take less room (bfloat16 weights 70 to 80 %) and longer to write; torch.load reads them
            as they are.
        dump_enable: False makes start() and stop() do nothing; the file is read once, not while running.
        async_dump: accepted; statistics are always read back at stop(), and tensors written in the background.
        precision: accepted; the figures are the same, and complete, for either value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Task = "statistics"
    level: Level = "L1"
    dump_path: Path = Path("dump_path")
    rank: List[int] = Field(default_factory=list)
    step: List[int] = Field(default_factory=list)
    scope: List[str] = Field(default_factory=list)
    list: List[str] = Field(default_factory=list)
    data_mode: List[DataMode] = ["all"]
    summary_mode: SummaryMode = "statistics"
    tensor_list: List[str] = []
    token_range: Optional[Tuple[int, int]] = None
    risk_level: RiskLevel = "FOCUS"
    extra_info: bool = True
    on_write_error: OnWriteError = "stop"
    compress: bool = False
    dump_enable: bool = True
    async_dump: bool = False
    precision: Precision = "low"

    @field_validator("rank", "step", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return expand_numbers(value)

    @field_validator("scope")
    @classmethod
    def _two_names(cls, value: Any) -> Any:
        if len(value) not in (0, 2):
            raise ValueError(f"takes no names or two, the first and the last record, not {len(value)}")
        return value

    @model_validator(mode="after")
    def _range_in_order(self) -> Config:
        if self.token_range is not None and not 0 <= self.token_range[0] <= self.token_range[1]:
            raise ValueError(f"token_range must be [first, last] with 0 <= first <= last, not {list(self.token_range)}")
        return self


def expand_numbers(value: Any) -> Any:
    """7, [0, "2-4"] and None to a list of ints; anything else is left for the validator to refuse."""
    if value is None:
        return []
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, (list, tuple)):
        return value
    numbers: List[Any] = []
    for entry in value:
        match = re.fullmatch(r"(\d+)-(\d+)", entry.strip()) if isinstance(entry, str) else None
        if match and int(match[1]) <= int(match[2]):
            numbers.extend(range(int(match[1]), int(match[2]) + 1))
        else:
            numbers.append(entry)
    return numbers


AnyConfig = TypeVar("AnyConfig", bound=Config)


def make_config(values: Dict[str, Any], kind: Type[AnyConfig]) -> AnyConfig:
    """A Config, or one of another kind, from keyword values.

    Raises:
        PrecisionError: naming the key, the value, and the keys or values there are.
    """
    unknown = sorted(set(values) - set(kind.model_fields))
    if unknown:
        raise PrecisionError(f"no option {', '.join(unknown)}; there are {', '.join(sorted(kind.model_fields))}")
    try:
        return kind(**values)
    except ValidationError as error:
        raise PrecisionError("; ".join(_explain(entry, kind) for entry in error.errors())) from error


def read_json_object(path: Union[str, os.PathLike[str]]) -> Dict[str, Any]:
    """The values of a JSON file.

    Raises:
        PrecisionError: for a file that can't be read or isn't a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PrecisionError(f"the config file {path} can't be read ({error.strerror})") from error
    except ValueError as error:
        raise PrecisionError(f"the config file {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise PrecisionError(f"the config file {path} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_config_file(path: Union[str, os.PathLike[str]]) -> Dict[str, Any]:
    """The values of a config.json in msprobe's layout: top-level keys, and a section named after the task.

    Raises:
        PrecisionError: for a file that can't be read or isn't a JSON object, and for unknown keys of the section.
    """
    content = read_json_object(path)
    sections = {key: content.pop(key) for key in TASKS if isinstance(content.get(key), dict)}
    task = content.get("task", "statistics")
    section = sections.get(task, {})
    # the keys of a section with a config of its own are checked with that
    unknown = sorted(set(section) - set(_TASK_KEYS)) if task != "free_benchmark" else []
    if unknown:
        raise PrecisionError(
            f"no option {', '.join(unknown)} in section {content.get('task', 'statistics')!r} of {path}; "
            f"there are {', '.join(_TASK_KEYS)}"
        )
    return {**content, **section}


def _explain(entry: Any, kind: Type[Config]) -> str:
    where = str(entry["loc"][0]) if entry["loc"] else "config"
    text = entry["msg"].removeprefix("Value error, ") if hasattr(str, "removeprefix") else entry["msg"]
    valid = _choices(where, kind)
    shown = entry.get("input")
    instead = _INSTEAD.get((where, shown)) if isinstance(shown, str) else None
    reason = f"there are {', '.join(valid)}" if valid else text
    return f"{where} = {shown!r}: {reason}" + (f"; {instead}" if instead else "")


def _choices(key: str, kind: Type[Config]) -> Tuple[str, ...]:
    if key == "data_mode":
        return get_args(DataMode)
    if key == "task":
        return TASKS
    hint = get_type_hints(kind).get(key)
    values = get_args(hint)
    return values if values and all(isinstance(value, str) for value in values) else ()
