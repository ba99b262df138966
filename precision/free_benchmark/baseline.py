"""The regression of free-benchmark: what each setting costs, and what it checks, for nine model families.

    python -m precision.free_benchmark.baseline [--models LLaMA2,Qwen] [--rounds 5] [--output table.csv]
    python -m precision.free_benchmark.baseline --model_path DIR --tokens 128 [--peer] [--only "check softmax"]

Prints, per model and setting, the median ratio of a step's time (CPU time without a GPU) to the plain step's, its
range, the ratio of the peak memory (model, inputs and all that torch gives out during the step), and how many calls
were checked and results flagged. The reports are thrown away.
--peer adds a row for msprobe where it has the setting (see baseline_peer.py); it doesn't tell what it has checked.
"""

from __future__ import annotations

import csv
import io
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import click
import torch
from torch import Tensor, nn

from precision.debugger import PrecisionDebugger
from precision.errors import PrecisionError
from precision.free_benchmark.baseline_memory import peak_bytes, ready_profiler
from precision.free_benchmark.baseline_models import FAMILIES
from precision.free_benchmark.baseline_peer import Peer, import_peer, peer_config
from precision.free_benchmark.config import NOISE_MODES
from precision.output import write_atomic

COLUMNS = (
    "model",
    "setting",
    "tool",
    "time",
    "time min",
    "time max",
    "rounds",
    "memory",
    "checked",
    "flagged",
    "not checked",
)
# Seconds after which a row goes without its remaining rounds.
PATIENCE = 60.0


class Measured(NamedTuple):
    """One row of the table; time and memory are ratios to the plain step.

    Counts are per step, and empty where the tool doesn't tell.
    """

    model: str
    setting: str
    tool: str
    time: float
    fastest: float
    slowest: float
    rounds: int
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
    name: str, model: nn.Module, batch: dict[str, Tensor], setting: str, options: Any, rounds: int, who: str
) -> Measured:
    """Measure one setting, plain and checked steps in turn.

    Args:
        rounds: fewer are made where they would take longer than PATIENCE.
        who: "ours" or "peer"; the peer must have the setting (see peer_config).
    """
    folder = Path(tempfile.mkdtemp(prefix="baseline-"))
    try:
        tool: Any
        if who == "ours":
            tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", quiet=True, **options)
        else:
            tool = Peer(folder, peer_config(options) or {})
        times, memory = _ratios(model, batch, tool, rounds, training=options.get("fuzz_stage") == "backward")
        counts = _counts(tool, len(times) + 1)
    finally:
        shutil.rmtree(folder)
    time_figures = (statistics.median(times), min(times), max(times), len(times))
    return Measured(name, setting, who, *time_figures, memory, *counts)


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
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    device = held[0].device
    # the tool's first step: what it makes once and keeps counts as well
    plain_peak, checked_peak = (peak_bytes(work, held, device) for work in (plain, checked))
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < rounds and (not ratios or time.perf_counter() - start < PATIENCE):
        before, during, after = (_seconds(work, device) for work in (plain, checked, plain))
        ratios.append(2 * during / (before + after))
    return ratios, checked_peak / plain_peak


def _counts(tool: Any, steps: int) -> tuple[Optional[int], int, Optional[int]]:
    """Calls checked, results flagged and calls not checked, per step."""
    if isinstance(tool, Peer):
        return None, tool.flagged() // steps, None
    summary = tool.summary
    unchecked = sum(sum(apis.values()) for apis in summary.unchecked.values())
    return (summary.checked or summary.replaced) // steps, sum(summary.flagged.values()) // steps, unchecked // steps


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Time of work: on a host the process's own, which other processes hardly disturb; else the clock's."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    accelerator = getattr(torch, device.type)
    accelerator.synchronize()
    start = time.perf_counter()
    work()
    accelerator.synchronize()
    return time.perf_counter() - start


def _subject(
    name: str, model_path: Optional[Path], tokens: int, device: str
) -> tuple[nn.Module, dict[str, Tensor], tuple[str, ...]]:
    """A model in bfloat16, its inputs, and the APIs of its own row: the family of this name, or a checkpoint's."""
    torch.manual_seed(0)
    family = FAMILIES["LLaMA2" if model_path is not None else name]
    model = _real_model(model_path) if model_path is not None else family.make().bfloat16()
    batch = {
        key: value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)
        for key, value in family.batch(tokens).items()
    }
    return model.to(device), batch, family.apis


def _real_model(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, torch_dtype=torch.bfloat16, attn_implementation="eager"
        )
    except OSError as error:
        raise click.UsageError(f"{path} holds no checkpoint: {str(error).splitlines()[0]}") from error
    return model


def _chosen(setting: str, only: tuple[str, ...], known: dict[str, Any]) -> bool:
    """Whether a setting is named or, by a text that is no setting's whole name, contained."""
    return not only or setting in only or any(text in setting for text in only if text not in known)


@click.command(context_settings={"show_default": True})
@click.option("--models", default=",".join(FAMILIES), help="Families, separated by commas.")
@click.option("--model_path", type=click.Path(path_type=Path, exists=True), help="A checkpoint instead, bfloat16.")
@click.option("--only", multiple=True, help="A setting, or settings whose name contains this; may be repeated.")
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
    only: tuple[str, ...],
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
    known = settings(tuple(api for family in FAMILIES.values() for api in family.apis))
    if not any(_chosen(setting, only, known) for setting in known):
        raise click.UsageError(f"no setting contains {' or '.join(only)}; there are {', '.join(known)}")
    torch.set_num_threads(threads)
    ready_profiler()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for name in [model_path.name] if model_path is not None else models.split(","):
        model, batch, apis = _subject(name, model_path, tokens, device)
        for setting, options in settings(apis).items():
            if not _chosen(setting, only, known):
                continue
            ready = model.train("backward" in setting)
            for who in ("ours", *(["peer"] if peer and peer_config(options) is not None else [])):
                # a thread of its own has a short stack: the peer walks through all of it at every call, and takes ten
                # times as long where it meets the frames of python -m, of which inspect finds no source
                with ThreadPoolExecutor(1) as thread:
                    row = thread.submit(measure, name, ready, batch, setting, options, rounds, who).result()
                writer.writerow(row)
                click.echo(_line(row))
    if output is not None:
        write_atomic(output, text.getvalue())


def _line(row: Measured) -> str:
    checked, unchecked = ("-" if count is None else count for count in (row.checked, row.unchecked))
    return (
        f"{row.model:16}{row.setting:60}{row.tool:5}time {row.time:6.2f} ({row.fastest:.2f} .. {row.slowest:.2f}) "
        f"in {row.rounds}  memory {row.memory:5.2f}  checked {checked:>5}  flagged {row.flagged:4}  "
        f"not checked {unchecked}"
    )


if __name__ == "__main__":
    sys.exit(main())
