"""The regression of free-benchmark: what each setting costs, and what it checks, for nine model families.

    python -m precision.free_benchmark.baseline [--models LLaMA2,Qwen] [--rounds 5] [--output table.csv]
    python -m precision.free_benchmark.baseline --model_path DIR --tokens 128 [--peer]

Prints, per model and setting, the median ratio of a step's time (CPU time without a GPU) to the plain step's, its
range, the ratio of the peak memory, and how many calls were checked and results flagged. The reports are thrown away.
--peer adds a row for msprobe where it has the setting (see baseline_peer.py); it doesn't tell what it has checked.
"""

from __future__ import annotations

import csv
import gc
import io
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import click
import torch
from torch import Tensor, nn

from precision.debugger import PrecisionDebugger
from precision.errors import PrecisionError
from precision.free_benchmark.baseline_models import FAMILIES
from precision.free_benchmark.baseline_peer import Peer, import_peer, peer_config
from precision.free_benchmark.config import NOISE_MODES
from precision.output import write_atomic

COLUMNS = ("model", "setting", "tool", "time", "time min", "time max", "memory", "checked", "flagged", "not checked")


class Measured(NamedTuple):
    """One row of the table; time and memory are ratios to the plain step, memory NaN where it can't be measured.

    Counts are per step, and empty where the tool doesn't tell.
    """

    model: str
    setting: str
    tool: str
    time: float
    fastest: float
    slowest: float
    memory: float
    checked: Optional[int]
    flagged: int
    unchecked: Optional[int]


def settings(apis: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The settings of the table: name to options. `apis` are the family's own."""
    rows: dict[str, dict[str, Any]] = {"check nothing matched": {"list": ["no_such_api"]}}
    for mode in ("improve_precision", *NOISE_MODES, "no_change", "to_cpu"):
        rows[f"check softmax {mode}"] = {"list": ["softmax"], "pert_mode": mode}
    rows["check matmul improve_precision"] = {"list": ["matmul"]}
    for mode in ("improve_precision", "change_value", "to_cpu"):
        rows[f"check linear {mode}"] = {"list": ["linear"], "pert_mode": mode}
    if apis:
        rows[f"check {'+'.join(apis)} improve_precision"] = {"list": list(apis)}
    for mode in ("improve_precision", *NOISE_MODES, "no_change", "to_cpu", "round_mode", "condition"):
        rows[f"check all {mode}"] = {"pert_mode": mode}
    for mode in ("improve_precision", *NOISE_MODES, "no_change"):
        rows[f"check all {mode}, rotate"] = {"pert_mode": mode, "rotate": True}
    rows["check all improve_precision, preheat"] = {"if_preheat": True, "preheat_step": 2}
    rows["fix softmax improve_precision"] = {"handler_type": "fix", "list": ["softmax"]}
    rows["fix all improve_precision"] = {"handler_type": "fix"}
    rows["fix all to_cpu"] = {"handler_type": "fix", "pert_mode": "to_cpu"}
    for mode in ("improve_precision", *NOISE_MODES, "no_change", "to_cpu"):
        rows[f"backward all {mode}"] = {"fuzz_stage": "backward", "pert_mode": mode}
    rows["backward softmax+matmul improve_precision"] = {"fuzz_stage": "backward", "list": ["softmax", "matmul"]}
    return rows


def measure(
    name: str,
    model: nn.Module,
    batch: dict[str, Tensor],
    setting: str,
    options: Any,
    rounds: int,
    peer: bool,
) -> list[Measured]:
    """Measure one setting, plain and checked steps in turn; a second row for the peer, where asked for and possible."""
    rows = []
    section = peer_config(options) if peer else None
    for who in ("ours", *(["peer"] if section is not None else [])):
        folder = Path(tempfile.mkdtemp(prefix="baseline-"))
        try:
            tool: Any
            if who == "ours":
                tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", quiet=True, **options)
            else:
                tool = Peer(folder, section or {})
            times, memory = _ratios(model, batch, tool, rounds, training=options.get("fuzz_stage") == "backward")
            counts = _counts(tool, rounds + 2)
        finally:
            shutil.rmtree(folder)
        rows.append(Measured(name, setting, who, statistics.median(times), min(times), max(times), memory, *counts))
    return rows


def _ratios(
    model: nn.Module, batch: dict[str, Tensor], tool: Any, rounds: int, *, training: bool
) -> tuple[list[float], float]:
    """A step's time with the tool, relative to the plain steps before and after it, and its peak memory."""

    def plain() -> None:
        with torch.set_grad_enabled(training):
            output = model(**batch)
            if training:
                output = output if isinstance(output, Tensor) else output.logits
                output.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    def checked() -> None:
        with tool.start(model):
            plain()
        tool.step()

    plain()
    checked()
    plain_peak, checked_peak = _peak_of(plain), _peak_of(checked)
    ratios = []
    for _ in range(rounds):
        before, during, after = _seconds(plain), _seconds(checked), _seconds(plain)
        ratios.append(2 * during / (before + after))
    return ratios, checked_peak / plain_peak


def _counts(tool: Any, steps: int) -> tuple[Optional[int], int, Optional[int]]:
    """Calls checked, results flagged and calls not checked, per step."""
    if isinstance(tool, Peer):
        return None, tool.flagged() // steps, None
    summary = tool.summary
    unchecked = sum(sum(apis.values()) for apis in summary.unchecked.values())
    return (summary.checked or summary.replaced) // steps, sum(summary.flagged.values()) // steps, unchecked // steps


def _seconds(work: Callable[[], None]) -> float:
    """Time of work: the clock's with a GPU, else the process's own, which other processes hardly disturb."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def _peak_of(work: Callable[[], None]) -> float:
    """Peak bytes during work: of the GPU where there is one, else of the process where the system tells."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        work()
        return float(torch.cuda.max_memory_allocated())
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        reset.write_text("5")
    except OSError:
        return float("nan")
    work()
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1]) * 1024


def _real_model(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, torch_dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model


@click.command(context_settings={"show_default": True})
@click.option("--models", default=",".join(FAMILIES), help="Families, separated by commas.")
@click.option("--model_path", type=click.Path(path_type=Path, exists=True), help="A checkpoint instead, bfloat16.")
@click.option("--only", default="", help="Settings whose name contains this.")
@click.option("--tokens", default=64, type=click.IntRange(min=2))
@click.option("--rounds", default=5, type=click.IntRange(min=1))
@click.option("--threads", default=1, type=click.IntRange(min=1))
@click.option("--device", default="cpu", help="cpu, cuda or npu.")
@click.option("--peer", is_flag=True, help="Also msprobe 8.3, where this environment has it.")
@click.option("--output", type=click.Path(path_type=Path), help="Also write the table as CSV.")
@click.option("--force", is_flag=True, help="Overwrite the CSV.")
def main(
    models: str,
    model_path: Optional[Path],
    only: str,
    tokens: int,
    rounds: int,
    threads: int,
    device: str,
    peer: bool,
    output: Optional[Path],
    force: bool,
) -> None:
    """Measure what free-benchmark costs and finds, family by family."""
    unknown = [name for name in models.split(",") if name not in FAMILIES]
    if unknown and model_path is None:
        raise click.UsageError(f"no model {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if output is not None and output.exists() and not force:
        raise click.UsageError(f"{output} is there already; pass --force to overwrite it, or another --output")
    if peer:
        try:
            import_peer()
        except PrecisionError as error:
            raise click.UsageError(str(error)) from error
    torch.set_num_threads(threads)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for name in [model_path.name] if model_path is not None else models.split(","):
        family = FAMILIES.get(name) if model_path is None else None
        torch.manual_seed(0)
        model = (_real_model(model_path) if model_path is not None else FAMILIES[name].make().bfloat16()).to(device)
        batch = (family or FAMILIES["LLaMA2"]).batch(tokens)
        batch = {
            key: value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)
            for key, value in batch.items()
        }
        for setting, options in settings(family.apis if family else ()).items():
            if only not in setting:
                continue
            ready = model.train("backward" in setting)
            for row in measure(name, ready, batch, setting, options, rounds, peer):
                writer.writerow(row)
                click.echo(_line(row))
    if output is not None:
        write_atomic(output, text.getvalue())


def _line(row: Measured) -> str:
    checked, unchecked = ("-" if count is None else count for count in (row.checked, row.unchecked))
    return (
        f"{row.model:16}{row.setting:60}{row.tool:5}time {row.time:6.2f} ({row.fastest:.2f} .. {row.slowest:.2f})  "
        f"memory {row.memory:5.2f}  checked {checked:>5}  flagged {row.flagged:4}  not checked {unchecked}"
    )


if __name__ == "__main__":
    sys.exit(main())
