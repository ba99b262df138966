"""What each optimisation gains: the cumulative table, from stock to everything."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Callable

import torch

from benchmark.generate import Subject, load_stock, timed_generation
from benchmark.metrics import summarise
from benchmark.workload import Workload
from npu_tuned_model import GraphOptions, TuningOptions, load_model

STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tuned code, everything off", ()),
    ("+ fixed KV cache", ("fixed_kv_cache",)),
    ("+ flash attention, cos/sin once", ("flash_attention", "fused_rope")),
    ("+ add + RMSNorm", ("fused_add_rms_norm",)),
    ("+ last-token logits", ("last_token_logits",)),
    ("+ fused QKV", ("fused_qkv",)),
    ("+ fused gate_up + SwiGLU", ("fused_gate_up",)),
    ("+ packed weights", ("packed_weights",)),
    ("+ KV lengths", ("kv_lengths",)),
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
    """Measure every row, one model in memory at a time.

    Args:
        graph: how to compile the steps that are measured beside eager ones; None for eager ones alone.
        prepare: called with each tuned model when it is loaded.
        on_row: called with each row's name before it is measured.

    Returns:
        one dict per row: optimisation, eager and graph; the last two are {prefill_ms, decode_ms}, each a median with
        its range, or None where there is nothing to measure.
    """
    rows = []
    for index, label in enumerate(("stock, eager attention", "stock, sdpa attention")):
        on_row(label)
        subject = load_stock(folder, device=device, dtype=dtype)[index]
        rows.append({"optimisation": label, "eager": _measure(subject, workload, device, rounds), "graph": None})
        del subject
        _free(device)
    for label, options in cumulative_options(device, graph=graph is not None):
        on_row(label)
        model = load_model(folder, device=device, dtype=dtype, options=options)
        prepare(model)
        row: dict[str, Any] = {"optimisation": label, "graph": None}
        row["eager"] = _measure(Subject(label, model), workload, device, rounds)
        if graph is not None:
            model.run_graph(graph)
            row["graph"] = _measure(Subject(label, model), workload, device, rounds)
        rows.append(row)
        del model
        _free(device)
    return rows


def _measure(subject: Subject, workload: Workload, device: torch.device, rounds: int) -> dict[str, Any]:
    timed_generation(subject, workload, device=device)  # warm-up
    summary = summarise([timed_generation(subject, workload, device=device)[0] for _ in range(rounds)])
    return {key: summary.get(key) for key in ("prefill_ms", "decode_ms")}


def _free(device: torch.device) -> None:
    """Let go of a model's graphs and memory before the next is loaded."""
    torch._dynamo.reset()
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
