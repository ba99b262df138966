"""The most memory that torch has given out while something runs."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Callable, Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None], held: Iterable[Tensor], device: torch.device) -> int:
    """Most bytes of tensors alive at once during work, on the device that it runs on.

    The process's resident memory would not do on a host: pages that are free again stay resident.

    Args:
        held: tensors that are alive before and after, such as the model's. A device's own figure counts them; on a
            host they are added, each memory once.
    """
    gc.collect()
    if device.type != "cpu":
        accelerator = getattr(torch, device.type)
        accelerator.reset_peak_memory_stats(device)
        work()
        return int(accelerator.max_memory_allocated(device))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values()) + _host_growth(work)


def ready_profiler() -> None:
    """To be called once by the main thread: torch's profiler complains when another one sets it up."""
    _host_growth(lambda: None)


def _host_growth(work: Callable[[], None]) -> int:
    """How far work drives up what torch's allocator for the host has given out, kernels' own buffers included."""
    # else its library writes to stderr that it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory(prefix="baseline-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    if not changes:
        return 0
    # the total goes on from one profile to the next
    first = min(changes, key=lambda event: event["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return max(0, *(int(event["args"]["Total Allocated"] - before) for event in changes))
