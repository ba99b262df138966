"""What each optimisation gains: the cumulative table, from stock to everything."""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any, Callable

import torch

from benchmark.generate import StockSubject, Subject, load_stock, timed_generation
from benchmark.metrics import Spread, summarise
from benchmark.workload import Workload
from npu_tuned_model import GraphOptions, TuningOptions, load_model

STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tuned code, everything off", ()),
    ("+ flash attention, cos/sin once", ("flash_attention", "fused_rope")),
    # one row: without the lengths decode would read a fixed cache to its end, filled or not
    ("+ fixed KV cache, KV lengths", ("fixed_kv_cache", "kv_lengths")),
    ("+ add + RMSNorm", ("fused_add_rms_norm",)),
    ("+ last-token logits", ("last_token_logits",)),
    # before the fused matmuls: what they gain hangs on the layout
    ("+ packed weights", ("packed_weights",)),
    ("+ fused QKV", ("fused_qkv",)),
    ("+ fused gate_up + SwiGLU", ("fused_gate_up",)),
)
CPU_STAGE = ("+ C++ decode kernels", ("native_kernels",))
NPU_GRAPH_STAGE = ("+ tiling sink", ("tiling_sink",))


def cumulative_options(device: torch.device, *, graph: bool) -> list[tuple[str, TuningOptions]]:
    """Each stage's name and options; the last only where they act, on a CPU and in a graph on an NPU."""
    options = TuningOptions.none()
    stages = []
    last = [CPU_STAGE] if device.type == "cpu" else [NPU_GRAPH_STAGE] if graph and device.type == "npu" else []
    for label, names in (*STAGES, *last):
        options = options.replace(**dict.fromkeys(names, True))
        stages.append((label, options))
    return stages


def run_ablation(
    folder: Path,
    workload: Workload,
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    graph: GraphOptions | None,
    prepare: Callable[[Any], None] = lambda model: None,
    on_row: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure every row in turn with the row above it, two models in memory at a time.

    A machine changes its speed while the table is made: what a row gains can only be seen beside the row above.

    Args:
        graph: how to compile the steps that are measured beside eager ones; None for eager ones alone.
        prepare: called with each tuned model when it is loaded.
        on_row: called with each row's name before it is measured.

    Returns:
        one dict per row: optimisation, eager and graph; the last two are {prefill_ms, decode_ms, prefill_gain,
        decode_gain}, each a median with its range over the rounds or None where there is nothing to measure. A
        round's decode_ms is its median step; a gain says how many times as fast the row is as the row above.
    """
    modes = {"eager": None} if graph is None else {"eager": None, "graph": graph}

    def measure(here: Subject, above: Subject | None) -> dict[str, Any]:
        on_row(here.name)
        row: dict[str, Any] = {"optimisation": here.name, "eager": None, "graph": None}
        for mode, options in modes.items():
            pair = [subject for subject in (above, here) if subject is not None and _run(subject, options)]
            if here in pair:
                row[mode] = _measure(pair, workload, device, rounds)
        return row

    eager, above = load_stock(folder, device=device, dtype=dtype)
    rows = [measure(eager, None), measure(above, eager)]
    del eager
    for label, options in cumulative_options(device, graph=graph is not None):
        model = load_model(folder, device=device, dtype=dtype, options=options)
        prepare(model)
        here = Subject(label, model)
        rows.append(measure(here, above))
        above = here
        _free(device)
    return rows


def _run(subject: Subject, graph: GraphOptions | None) -> bool:
    """Make the subject run as these graphs, or eager for None; whether it can."""
    if isinstance(subject, StockSubject):
        return graph is None
    if graph is None:
        subject.model.run_eager()
    else:
        subject.model.run_graph(graph)
    return True


def _measure(pair: list[Subject], workload: Workload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Figures of the last subject, and its gain where there are two."""
    for subject in pair:
        timed_generation(subject, workload, device=device)  # warm-up
    figures: list[list[dict[str, Any]]] = [[] for _ in pair]
    for turn in range(rounds):
        # each is the first to run as often as the other
        for index in range(len(pair)) if turn % 2 else reversed(range(len(pair))):
            steps = timed_generation(pair[index], workload, device=device)[0]["step_ms"]
            figures[index].append({"prefill_ms": steps[0]})
            if steps[1:]:
                # not the mean: a stall of the machine would decide who is the faster
                figures[index][-1]["decode_ms"] = statistics.median(steps[1:])
    summary = summarise(figures[-1])
    result: dict[str, Any] = {}
    for step in ("prefill", "decode"):
        key, gain = f"{step}_ms", None
        if len(pair) == 2 and key in summary:
            gain = Spread.of([above[key] / here[key] for above, here in zip(*figures)]).as_dict()
        result.update({key: summary.get(key), f"{step}_gain": gain})
    return result


def _free(device: torch.device) -> None:
    """Let go of models' graphs and memory before the next is loaded."""
    torch._dynamo.reset()
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
