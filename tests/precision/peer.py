"""msprobe (PyPI mindstudio-probe) in a folder of its own, for subprocesses: its pins must not touch our environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from npu_tuned_model.simulate.environment import cache_folder
from npu_tuned_model.simulate.wheel import package_folder

VERSION = "26.2.0"


def peer_folder() -> Path:
    """The folder that holds msprobe, fetched when it isn't there yet."""
    return package_folder(cache_folder(), f"mindstudio-probe=={VERSION}")


def run_with_peer(script: str, *arguments: str, folder: Path) -> str:
    """Run Python code beside msprobe, in `folder`; its output."""
    environment = {**os.environ, "PYTHONPATH": str(peer_folder())}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
