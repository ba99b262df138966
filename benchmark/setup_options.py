"""Command-line options for what a process is set up with, shared by the commands."""

from __future__ import annotations

import functools
from typing import Any, Callable

import click


def _switch(name: str, default: bool, explanation: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}/--no_{name}", default=default, show_default=True, help=explanation)


_SWITCHES = (
    _switch("jit_compile", False, "NPU: compile eager operators anew for each shape, not the prebuilt ones."),
    _switch("nz_weights", True, "NPU: store the linear layers' weights in the tiled format FRACTAL_NZ."),
    _switch("hccl_variables", True, "NPU: set HCCL's environment variables where you haven't (several cards)."),
    _switch("core_binding", True, "Keep each card's process on its own share of the cores."),
    _switch("frozen_gc", True, "No Python garbage collection while tokens are generated."),
)


def setup_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it receives them as one NpuSetup, `setup`."""

    @functools.wraps(command)
    def with_setup(**options: Any) -> Any:
        from npu_tuned_model.npu_setup import NpuSetup

        fields = {name: options.pop(name) for name in NpuSetup.names()}
        return command(setup=NpuSetup(**fields), **options)

    for switch in reversed(_SWITCHES):
        with_setup = switch(with_setup)
    return with_setup
