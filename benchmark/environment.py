"""What a figure was measured on and with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from npu_tuned_model import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, threads, memory and the settings that change speed."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "npu_tuned_model": __version__,
    }
    if device.type == "npu":
        import torch_npu

        versions["torch_npu"] = torch_npu.__version__
    return {
        "versions": versions,
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "device": device.type if device.type == "cpu" else getattr(torch, device.type).get_device_name(device),
        "cpu": cpu_name(),
        "cpu_cores": psutil.cpu_count(logical=True),
        "torch_threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system reports it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
