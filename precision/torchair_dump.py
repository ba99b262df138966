"""torchair's own dump of the graphs that it compiles, set by this debugger's options.

On an NPU no Python runs inside a compiled graph: the device writes the tensors of the graph's nodes itself, in CANN's
format and under the nodes' names. What is to be written is fixed when a graph is compiled. Names and values of the
options: torchair/configs/dump_config.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from precision.config import Config
from precision.errors import PrecisionError

FOLDER = "torchair"


def set_dump_options(compiler_config: Any, config: Config) -> Path:
    """Make torchair dump what `config` asks for; where it goes.

    Args:
        compiler_config: a torchair.CompilerConfig whose mode is set already.
        config: task "tensor" dumps whole tensors, "statistics" their statistics; data_mode one of "input", "output" and
            "all"; list holds names of GE nodes; step counts runs of a graph, which torchair numbers from 0.

    Raises:
        PrecisionError: for options that torchair's dump doesn't have in this mode.
    """
    captured = compiler_config.mode.value != "max-autotune"
    _check(config, captured, compiler_config.mode.value)
    folder = config.dump_path / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise PrecisionError(f"dump_path can't be written: {folder} ({reason}); choose another dump_path") from error
    options = compiler_config.dump_config
    options.dump_path = str(folder)
    options.enable_dump = config.dump_enable
    if not captured:
        options.dump_mode = _sides(config)
        options.dump_data = "tensor" if config.task == "tensor" else "stats"
        options.dump_step = "|".join(map(str, config.step))
        options.dump_layer = " ".join(config.list)
    return folder


def _check(config: Config, captured: bool, mode: str) -> None:
    defaults = Config()
    names = ["scope", "token_range", "tensor_list", "summary_mode"]
    if captured:
        # it saves every tensor of every run
        names += ["list", "step", "data_mode"]
    asked = [name for name in names if getattr(config, name) != getattr(defaults, name)]
    if asked:
        raise PrecisionError(f"torchair's dump has no {', '.join(asked)} in mode {mode}: leave that out")
    if set(config.data_mode) & {"forward", "backward"}:
        raise PrecisionError("torchair's dump doesn't tell forward from backward: data_mode is input, output or all")
    tasks = ("tensor",) if captured else ("tensor", "statistics")
    if config.task not in tasks:
        raise PrecisionError(f"torchair's dump has no task {config.task!r} in mode {mode}; use {' or '.join(tasks)}")


def _sides(config: Config) -> str:
    sides = {"input", "output"} & set(config.data_mode)
    return sides.pop() if len(sides) == 1 and "all" not in config.data_mode else "all"
