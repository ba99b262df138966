"""The released torch_npu wheel in a folder of its own, for subprocesses only.

It is never installed into the environment: torch loads every device back end it finds there, so without CANN even
`import torch` would fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from npu_tuned_model.errors import UserError

# what torch_npu (yaml) and torchair (protobuf) import beside what torch and transformers bring
COMPANIONS = ("protobuf==6.33.0", "pyyaml==6.0.3")


def torch_npu_folder(cache: Path) -> Path:
    """The folder that holds the torch_npu package for this Python and this torch, fetched when it isn't there yet.

    Args:
        cache: folder under which it is kept.

    Raises:
        UserError: the wheel can't be fetched, or there is none for this Python and this torch.
    """
    wanted = version("torch").partition("+")[0]
    return package_folder(cache, f"torch_npu=={wanted}", "--no-deps", "--only-binary=:all:", *COMPANIONS)


def package_folder(cache: Path, package: str, *arguments: str) -> Path:
    """A folder with one package of PyPI's, fetched when it isn't there yet; nothing but the whole is ever seen there.

    Args:
        cache: folder under which it is kept.
        package: name and version, "torch_npu==2.13.0".
        arguments: what else pip is told: options, and packages that go into the same folder.

    Raises:
        UserError: it can't be fetched, or there is none for this Python.
    """
    folder = cache / f"{package.replace('==', '-')}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache))
    try:
        _install(temporary, [package, *arguments])
        os.rename(temporary, folder)
    except OSError:
        # another process was faster
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _install(folder: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--target", str(folder), *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = lines[-1].strip() if lines else f"pip ended with status {result.returncode}"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(f"{arguments[0]} is needed for Python {python} and could not be installed: {reason}")
