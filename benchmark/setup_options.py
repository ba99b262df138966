"""Command-line options for how a process and its graphs are set up, shared by the commands."""

from __future__ import annotations

import functools
from typing import Any, Callable

import click


def _switch(name: str, default: bool, explanation: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}/--no_{name}", default=default, show_default=True, help=explanation)


_OPTIONS = (
    click.option(
        "--graph_mode",
        type=click.Choice(["max-autotune", "reduce-overhead", "npugraph_ex"]),
        default="max-autotune",
        show_default=True,
        help="NPU graphs: compiled by the graph engine, or captured kernels (the other two, one thing by two names).",
    ),
    click.option(
        "--attention",
        type=click.Choice(["auto", "pfa_ifa", "fia"]),
        default="auto",
        show_default=True,
        help="NPU: the attention operators; auto takes those that the chip and the graph mode are best served by.",
    ),
    _switch("compile_cache", False, "NPU: keep compiled graphs in your cache folder for the next process."),
    _switch("cuda_graphs", False, "CUDA graphs: record decode's kernels and start them together."),
    _switch("jit_compile", False, "NPU: compile eager operators anew for each shape, not the prebuilt ones."),
    _switch("nz_weights", True, "NPU: store the linear layers' weights in the tiled format FRACTAL_NZ."),
    _switch("hccl_variables", True, "NPU: set HCCL's environment variables where you haven't (several cards)."),
    _switch("core_binding", True, "Keep each card's process on its own share of the cores."),
    _switch("frozen_gc", True, "No Python garbage collection while tokens are generated."),
)


def setup_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it receives them as `setup` (NpuSetup), `graph` (GraphOptions) and `attention`."""

    @functools.wraps(command)
    def with_setup(**options: Any) -> Any:
        from npu_tuned_model.compile_cache import default_folder
        from npu_tuned_model.graph import GraphOptions
        from npu_tuned_model.npu_setup import NpuSetup

        setup = NpuSetup(**{name: options.pop(name) for name in NpuSetup.names()})
        cache = default_folder() if options.pop("compile_cache") else None
        recorded = options.pop("cuda_graphs")
        graph = GraphOptions(torchair_mode=options.pop("graph_mode"), compile_cache=cache, cuda_graphs=recorded)
        return command(setup=setup, graph=graph, **options)

    for option in reversed(_OPTIONS):
        with_setup = option(with_setup)
    return with_setup
