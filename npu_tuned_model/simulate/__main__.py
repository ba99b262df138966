"""``python -m npu_tuned_model.simulate SCRIPT ARGS...``: run a script on a simulated Ascend NPU, without an NPU.

The script gets the released torch_npu on stub CANN libraries; operators on npu tensors are computed by this machine's
CPU, on host memory. Eager code runs whole. Graphs are built by torchair down to the last GE node, shown, and run by
interpreting the FX graph they were built from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Sequence

from npu_tuned_model.errors import UserError
from npu_tuned_model.simulate.environment import DEFAULT_SOC, npu_environment

WHAT_IT_IS = (
    "Simulated NPU: a development tool. This machine's CPU computes the operators; no figure is a performance figure."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script in a process of its own; its exit status, or 2 for a mistake in the command line."""
    parser = argparse.ArgumentParser(prog="python -m npu_tuned_model.simulate", description=WHAT_IT_IS)
    parser.add_argument("--devices", type=int, default=1, help="number of NPUs (default 1)")
    parser.add_argument("--soc", default=DEFAULT_SOC, help=f"chip, as CANN spells it (default {DEFAULT_SOC})")
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, metavar="MODULE ARGS", help="run a module, as python -m does")
    parser.add_argument("script", nargs=rest, metavar="SCRIPT ARGS", help="the script to run, and its arguments")
    options = parser.parse_args(arguments)
    try:
        command = _command(options.script if options.module is None else ["-m", *options.module])
        environment = npu_environment(soc=options.soc, devices=options.devices)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    environment["NPU_STUB_REFUSE"] = "1"
    print(WHAT_IT_IS, flush=True)
    return subprocess.run(command, env=environment).returncode


def _command(script: list[str]) -> list[str]:
    if not script or (script[0] == "-m" and len(script) == 1):
        raise UserError(
            "no script was given; write it after the options: python -m npu_tuned_model.simulate SCRIPT ARGS"
        )
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UserError(f"{script[0]} is no file; give the script to run, then its arguments")
    return [sys.executable, "-m", "npu_tuned_model.simulate.run_script", *script]


if __name__ == "__main__":
    sys.exit(main())
