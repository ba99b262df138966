"""msprobe (PyPI mindstudio-probe) in a folder of its own, for subprocesses: its pins must not touch our environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

VERSION = "26.2.0"


def peer_folder() -> Path:
    """The folder that holds msprobe, fetched when it isn't there yet."""
    cache = platformdirs.user_cache_path("npu-tuned-qwen2")
    folder = cache / f"mindstudio-probe-{VERSION}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--target", str(temporary), f"mindstudio-probe=={VERSION}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        try:
            os.rename(temporary, folder)
        except OSError:
            # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def run_with_peer(script: str, *arguments: str, folder: Path) -> str:
    """Run Python code beside msprobe, in `folder`; its output."""
    environment = {**os.environ, "PYTHONPATH": str(peer_folder())}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
