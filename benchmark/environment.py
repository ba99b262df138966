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
from npu_tuned_model.simulate.environment import in_npu_environment

SIMULATED = "the NPU is simulated: its operators were computed by this machine's CPU, and no time here is a measurement"


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
        "device": _device_name(device),
        "simulated": is_simulated(device),
        "cpu": cpu_name(),
        "cpu_cores": psutil.cpu_count(logical=True),
        "torch_threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
    }


def is_simulated(device: torch.device) -> bool:
    """Whether it is the NPU of ``python -m npu_tuned_model.simulate``."""
    return device.type == "npu" and in_npu_environment()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = str(getattr(torch, device.type).get_device_name(device))
    return f"simulated {name} (computed by the CPU)" if is_simulated(device) else name


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system reports it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
