"""Devices and dtypes as users name them."""

from __future__ import annotations

import importlib.util

import torch

from npu_tuned_model.errors import UserError

DEVICES = ("auto", "cpu", "cuda", "npu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device for a name of DEVICES (or one with an index, "cuda:1"); "auto" takes the NPU, the GPU, the CPU.

    Raises:
        UserError: for an unknown name, and for a device that isn't there.
    """
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise UserError(f"no device {name!r}; there are {', '.join(DEVICES)}")
    if kind == "auto":
        if importlib.util.find_spec("torch_npu") is not None and _npu_available():
            return torch.device("npu")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            raise UserError(
                "--device=npu needs torch_npu, which is not installed; install the version that fits your torch and "
                "CANN, or take --device=cpu"
            )
        if not _npu_available():
            raise UserError("torch_npu is installed but finds no NPU; check the driver (npu-smi info), or --device=cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda needs a GPU and a CUDA build of torch, and there is none; take --device=cpu")
    return torch.device(name)


def _npu_available() -> bool:
    import torch_npu

    return bool(torch_npu.npu.is_available())


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype for a name of DTYPES.

    Raises:
        UserError: for any other name.
    """
    if name not in DTYPES:
        raise UserError(f"no dtype {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; nothing to do on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
