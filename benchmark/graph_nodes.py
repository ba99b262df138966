"""The nodes an NPU runs in each decoder layer, as rows of the table of what is in force."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from npu_tuned_model.tuning import InForce, TuningOptions


def graph_node_rows(
    folder: Path, options: TuningOptions, *, attention: str, dtype: str, batch: int, prompt: int, new_tokens: int
) -> list[InForce]:
    """One row for each phase: the GE nodes of a layer by operator, their sum, and a public implementation's sum.

    In a process of its own, which builds the graphs of two small models and runs nothing; where it fails, the row says
    how.
    """
    command = [sys.executable, "-m", "npu_tuned_model.node_table", "--json", f"--config={folder}", f"--dtype={dtype}"]
    command += [f"--attention={attention}", f"--batch_size={batch}", f"--input_max_len={prompt}"]
    command += [f"--max_new_tokens={new_tokens}"]
    command += [f"--without={name}" for name in options.names() if not getattr(options, name)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        complaint = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return [InForce("graph_nodes", True, False, f"could not be counted: {complaint}")]
    counts: dict[str, list[tuple[str, str, str]]] = {}
    for phase, kind, ours, public in json.loads(result.stdout.strip().splitlines()[-1]):
        counts.setdefault(phase, []).append((kind, ours, public))
    return [InForce(f"graph_nodes_{phase}", True, True, _sentence(rows)) for phase, rows in counts.items()]


def _sentence(rows: list[tuple[str, str, str]]) -> str:
    nodes = [f"{ours} {kind}" for kind, ours, _ in rows if not kind.startswith("all") and ours != "0"]
    sums = [f"{kind[5:]}: {ours} (public: {public})" for kind, ours, public in rows if kind.startswith("all, ")]
    return f"{'; '.join(sums)}; a layer: {', '.join(nodes)}"
