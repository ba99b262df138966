"""Where files go: a folder that is tried out before the long run, and files that appear only when complete."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def probe(folder: Path) -> None:
    """Make a folder and see that files can be written to it.

    Raises:
        OSError: when they can't.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ".probe", "probe")
    (folder / ".probe").unlink()


def write_atomic(path: Path, text: str) -> None:
    """The whole file or none of it.

    Raises:
        OSError: when it can't be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
