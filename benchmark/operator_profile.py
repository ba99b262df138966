"""One generation under the device's profiler: a trace for its viewer, and the ten operators that take most time."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, Callable

import torch

from benchmark.environment import is_simulated
from npu_tuned_model.errors import UserError

HEAVIEST = 10
# a viewer takes a few dozen megabytes, which is a prefill and so many decode steps
PROFILED_TOKENS = 16


def check_profiler(device: torch.device) -> None:
    """Raises UserError where there is no profiler."""
    if is_simulated(device):
        raise UserError("--profile needs an NPU and CANN's profiler; the simulated NPU takes no time of its own")


def profile(run: Callable[[], object], device: torch.device, trace: Path) -> list[dict[str, Any]]:
    """The heaviest operators of run(), by time of their own on the device.

    Args:
        trace: gets the trace: a file for chrome://tracing or Perfetto; on an NPU a folder, for MindStudio Insight too.

    Returns:
        {"operator", "calls", "ms", "share"} each; share is of all operators' time.
    """
    if device.type == "npu":
        return _profile_npu(run, trace)
    on_device = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_device:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    partial = trace.with_name(f".{trace.name}")
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, trace)
    attribute = "self_device_time_total" if on_device else "self_cpu_time_total"
    return heaviest([(event.key, event.count, getattr(event, attribute) / 1000) for event in profiler.key_averages()])


def heaviest(operators: list[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """The first ten of (operator, calls, milliseconds)."""
    total = sum(milliseconds for _, _, milliseconds in operators)
    ordered = sorted(operators, key=lambda operator: operator[2], reverse=True)[:HEAVIEST]
    return [
        {"operator": name, "calls": calls, "ms": milliseconds, "share": milliseconds / total if total else 0.0}
        for name, calls, milliseconds in ordered
    ]


def read_npu_statistics(folder: Path) -> list[dict[str, Any]]:
    """The heaviest operators by the op_statistic.csv that torch_npu's profiler leaves below `folder`.

    Raises:
        UserError: there is none.
    """
    files = sorted(folder.rglob("op_statistic.csv"))
    if not files:
        raise UserError(f"torch_npu's profiler left no op_statistic.csv in {folder}; look at its own messages above")
    with files[-1].open(newline="", encoding="utf-8") as file:
        rows = [
            (row["OP Type"], int(row["Count"]), float(row["Total Time(us)"]) / 1000) for row in csv.DictReader(file)
        ]
    return heaviest(rows)


def _profile_npu(run: Callable[[], object], trace: Path) -> list[dict[str, Any]]:
    from torch_npu import profiler

    folder = trace.with_suffix("")
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    handler = profiler.tensorboard_trace_handler(str(folder))
    with profiler.profile(activities=activities, on_trace_ready=handler):
        run()
        torch.npu.synchronize()
    return read_npu_statistics(folder)
