"""The child process of ``python -m npu_tuned_model.simulate``: start the simulated NPU, then run the script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, Sequence

import torch
import torch_npu  # noqa: F401  this process exists to have it

from npu_tuned_model.simulate import collectives, device, graph_engine


def main(arguments: Sequence[str]) -> None:
    """Run ``SCRIPT ARGS...`` or ``-m MODULE ARGS...`` as python would, with the simulated NPU behind torch_npu."""
    device.start()
    graph_engine.install()
    collectives.install()
    _print_from_host()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _print_from_host() -> None:
    """Let a tensor be printed: torch switches every dispatch mode off for that, and so the simulation, too."""
    original = torch._tensor_str._str

    def text(tensor: torch.Tensor, **kwargs: Any) -> str:
        has_memory = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if tensor.device.type != "npu" or not has_memory:
            return original(tensor, **kwargs)
        return f"{original(device.host_view(tensor.detach()), **kwargs)[:-1]}, device='{tensor.device}')"

    torch._tensor_str._str = text  # type: ignore[assignment]


if __name__ == "__main__":
    main(sys.argv[1:])
