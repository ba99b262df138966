"""The environment of a subprocess that sees an NPU: torch_npu's folder, the stub CANN libraries, the chip to play."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Mapping, Sequence

import platformdirs

from npu_tuned_model.errors import UserError
from npu_tuned_model.simulate.stub_libraries import build_stub_libraries
from npu_tuned_model.simulate.wheel import torch_npu_folder

DEFAULT_SOC = "Ascend910B3"
MOST_DEVICES = 64


def cache_folder() -> Path:
    """Where the wheel and the stub libraries are kept between runs."""
    return Path(platformdirs.user_cache_dir("npu-tuned-qwen2"))


def npu_environment(
    *,
    soc: str = DEFAULT_SOC,
    devices: int = 1,
    cache: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment variables with which a subprocess can `import torch_npu` and sees `devices` NPUs of type `soc`.

    Args:
        soc: name of the chip, as CANN spells it (Ascend910B3, Ascend310P3, Ascend950PR_9599, ...).
        devices: number of devices, 1 to 64.
        cache: folder for the wheel and the stub libraries; by default one in the user's cache folder.
        base: the variables to start from; by default this process's.

    Raises:
        UserError: the wheel or a compiler can't be had, or devices is out of range.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(f"{devices} simulated devices; there can be 1 to {MOST_DEVICES}")
    cache = cache or cache_folder()
    wheel = torch_npu_folder(cache)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    stubs = build_stub_libraries(wheel / "torch_npu", Path(torch.origin).parent, cache)
    # a real CANN's variables would mix the real thing with the stubs
    environment = {
        name: value for name, value in (base or os.environ).items() if not name.startswith(("ASCEND_", "CANN_"))
    }
    package = Path(__file__).parents[2]
    environment["PYTHONPATH"] = _prepend([wheel, package], environment.get("PYTHONPATH"))
    environment["LD_LIBRARY_PATH"] = _prepend([stubs], environment.get("LD_LIBRARY_PATH"))
    environment["ASCEND_HOME_PATH"] = environment["ASCEND_OPP_PATH"] = str(stubs)
    # what torch_npu would do on a thread of its own is then done before the next operator is computed
    environment["TASK_QUEUE_ENABLE"] = "0"
    environment["NPU_STUB_SOC"] = soc
    environment["NPU_STUB_DEVICES"] = str(devices)
    return environment


def run_on_npu(
    command: Sequence[str],
    *,
    soc: str = DEFAULT_SOC,
    devices: int = 1,
    cache: Path | None = None,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command in npu_environment(); its exit status is in the result, its output too when `capture`."""
    environment = npu_environment(soc=soc, devices=devices, cache=cache)
    return subprocess.run(list(command), env=environment, text=True, capture_output=capture)


def in_npu_environment() -> bool:
    """Whether this process was started in npu_environment()."""
    return "NPU_STUB_SOC" in os.environ


def _prepend(folders: Sequence[Path], path: str | None) -> str:
    return os.pathsep.join([*map(str, folders), *([path] if path else [])])
