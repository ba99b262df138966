"""``python -m npu_tuned_model.node_table --config DIR``: the nodes an NPU runs per decoder layer, for a configuration.

The graphs are torchair's own, of prefill and decode; nothing is run and no weights are needed. On a machine without an
NPU the command starts itself again with the released torch_npu on stub CANN libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from transformers import Qwen2Config

from npu_tuned_model.chip import ATTENTION
from npu_tuned_model.config import read_config
from npu_tuned_model.device import DTYPES
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.tuning import TuningOptions

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class NodeTable:
    """The GE nodes of one step, by operator, without those that only carry data in and out.

    Attributes:
        layer: in each decoder layer.
        outside: before, between and behind the layers.
    """

    layer: Counter[str]
    outside: Counter[str]


# A public implementation of the same design (Ascend/torchair, npu_tuned_model/llm/qwen at 4e6e491d), its graphs built
# the same way: bfloat16, batch 2, prompt 64, cache 256. Only the sums are known for the nodes outside the layers.
_PUBLIC_BOTH = {"Reshape": 13, "Transpose": 5, "MatMul": 5, "Scatter": 2, "AddRmsNorm": 2, "SplitV": 1}
_PUBLIC_BOTH.update({"ApplyRotaryPosEmb": 1, "Swish": 1, "Mul": 1})
PUBLIC = {
    "prefill": Counter(
        {**_PUBLIC_BOTH, "Cast": 4, "TensorMove": 4, "Fill": 2, "Identity": 1, "PromptFlashAttention": 1}
    ),
    "decode": Counter({**_PUBLIC_BOTH, "Cast": 2, "TensorMove": 2, "Unsqueeze": 1, "IncreFlashAttention": 1}),
}
PUBLIC_OUTSIDE = {"prefill": 21, "decode": 14}


def count_nodes(
    config: Qwen2Config,
    options: TuningOptions | None = None,
    *,
    graph_options: GraphOptions | None = None,
    attention: str = "auto",
    batch: int = 4,
    prompt: int = 1024,
    new_tokens: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, NodeTable]:
    """The tables of "prefill" and "decode"; in a process that has torch_npu.

    Two graphs of each step are built, for models of 1 and of 2 layers: what the second adds is a layer's nodes.

    Args:
        config: of the model; its number of layers doesn't matter.
        attention: one of chip.ATTENTION.

    Raises:
        UserError: for options that don't go together.
    """
    from npu_tuned_model.simulate.graph_recorder import recorded_graphs
    from npu_tuned_model.simulate.unset_model import run_steps, unset_model

    counts: dict[int, list[Counter[str]]] = {}
    for layers in (1, 2):
        model = unset_model(config, layers, options, dtype)
        model.attention = attention
        model.run_graph(graph_options)
        with recorded_graphs() as graphs:
            run_steps(model, batch=batch, prompt=prompt, capacity=prompt + new_tokens, decode_steps=1)
        counts[layers] = [Counter(_kind(node.kind) for node in graph.working_nodes()) for graph in graphs]
    tables = {}
    for phase, one, two in zip(PHASES, counts[1], counts[2]):
        layer = two - one
        tables[phase] = NodeTable(layer, one - layer)
    return tables


def _kind(kind: str) -> str:
    # one matmul, with a bias or without
    return "MatMul" if kind == "MatMulV2" else kind


def in_force(tables: dict[str, NodeTable]) -> list[tuple[str, str, str, str]]:
    """Rows (phase, operator, ours, public) of the nodes per layer, and of the sums inside and outside the layers."""
    rows = []
    for phase, table in tables.items():
        for kind in sorted({*table.layer, *PUBLIC[phase]}, key=lambda kind: (-table.layer[kind], kind)):
            rows.append((phase, kind, str(table.layer[kind]), str(PUBLIC[phase][kind])))
        rows.append((phase, "all, per layer", str(sum(table.layer.values())), str(sum(PUBLIC[phase].values()))))
        rows.append((phase, "all, outside the layers", str(sum(table.outside.values())), str(PUBLIC_OUTSIDE[phase])))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0, or 2 for a mistake in the command line."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if importlib.util.find_spec("torch_npu") is None:
            from npu_tuned_model.simulate.environment import npu_environment

            command = [sys.executable, "-m", __spec__.name, *(sys.argv[1:] if arguments is None else arguments)]
            environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **npu_environment(soc=given.soc)}
            return subprocess.run(command, env=environment).returncode
        with _device():
            _print_table(given)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _device() -> contextlib.AbstractContextManager[Any]:
    """What makes the few operators outside the graphs run: nothing on an NPU, the simulation on stub libraries."""
    from npu_tuned_model.simulate.environment import in_npu_environment

    if not in_npu_environment():
        return contextlib.nullcontext()
    from npu_tuned_model.simulate.device import SimulatedDevice

    return SimulatedDevice()


def _parser() -> argparse.ArgumentParser:
    from npu_tuned_model.simulate.environment import DEFAULT_SOC

    parser = argparse.ArgumentParser(
        prog="python -m npu_tuned_model.node_table",
        description="The nodes an NPU runs in each decoder layer, beside a public implementation of the same design.",
    )
    parser.add_argument("--config", required=True, type=Path, help="folder with the model's config.json")
    parser.add_argument("--phase", choices=(*PHASES, "both"), default="both")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--input_max_len", type=int, default=1024, help="tokens of the padded prompt")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="room for new tokens in the cache")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--attention", choices=ATTENTION, default="auto", help="attention operators")
    parser.add_argument("--dynamic", action="store_true", help="graphs of symbolic prompt length and capacity")
    parser.add_argument(
        "--without", action="append", default=[], metavar="OPTIMISATION", help="switch one off; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--soc", default=DEFAULT_SOC, help="chip to play, where there is no NPU")
    return parser


def _print_table(given: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    # torch_npu and torchair repeat with every compilation what was chosen on purpose
    warnings.simplefilter("ignore")
    tables = count_nodes(
        read_config(given.config),
        TuningOptions().replace(**{name: False for name in given.without}),
        graph_options=GraphOptions(dynamic=given.dynamic),
        attention=given.attention,
        batch=given.batch_size,
        prompt=given.input_max_len,
        new_tokens=given.max_new_tokens,
        dtype=DTYPES[given.dtype],
    )
    phases = PHASES if given.phase == "both" else (given.phase,)
    rows = in_force({phase: tables[phase] for phase in phases})
    if given.json:
        print(json.dumps(rows))
        return
    table = Table("phase", "GE node", "this model", "public")
    for row in rows:
        table.add_row(*row, style="bold" if row[1].startswith("all") else None)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
