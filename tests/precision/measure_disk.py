"""How fast whole tensors get to disk: dd with a sync, and the dump's own writer with a sync, in turn.

    python tests/precision/measure_disk.py [--folder DIR] [--gigabytes 1] [--rounds 3] [--threads 1]

Prints, per round, both speeds, their ratio, and by how much the resident memory grew at its peak. The tensors have the
sizes that Qwen2-0.5B's have in bfloat16 at 128 tokens: activations of the hidden and the MLP's width, and MLP weights.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from precision.dump.tensor_files import TensorFiles

ELEMENTS = (128 * 896, 128 * 4864, 896 * 4864)
BLOCK = 4 << 20


def dd(folder: Path, size: int) -> float:
    """Seconds that dd needs for `size` bytes, until they are on disk."""
    target = folder / "dd"
    start = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={BLOCK}", f"count={size // BLOCK}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    os.sync()
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def dump(folder: Path, size: int) -> float:
    """Seconds that the dump's writer needs for as many bytes of tensors, until they are on disk."""
    sources = [torch.randn(elements).bfloat16() for elements in ELEMENTS]
    files = TensorFiles()
    target = folder / "dump"
    target.mkdir()
    start = time.perf_counter()
    saved = number = 0
    while saved < size:
        tensor = sources[number % len(sources)]
        # what was saved before and has not changed would become a link
        tensor[:1].add_(1)
        files.save(tensor, target / f"{number}.pt")
        saved += tensor.numel() * tensor.element_size()
        number += 1
    files.finish()
    os.sync()
    seconds = time.perf_counter() - start
    if files.failure is not None or files.written != number:
        raise click.ClickException(files.failure or f"{number - files.written} of {number} files were not written")
    shutil.rmtree(target)
    return seconds * size / saved


class PeakMemory:
    """Growth of the resident memory while entered, in bytes."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._base = self._process.memory_info().rss
        self.growth = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.growth = max(self.growth, self._process.memory_info().rss - self._base)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(), help="On the disk in question.")
@click.option("--gigabytes", default=1.0)
@click.option("--rounds", default=3)
@click.option("--threads", default=1)
def main(folder: Path, gigabytes: float, rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    size = int(gigabytes * (1 << 30)) // BLOCK * BLOCK
    scratch = Path(tempfile.mkdtemp(prefix="disk-", dir=folder))
    ratios = []
    try:
        for _ in range(rounds):
            os.sync()
            plain = dd(scratch, size)
            with PeakMemory() as memory:
                ours = dump(scratch, size)
            ratios.append(plain / ours)
            print(
                f"dd {size / plain / 1e6:.0f} MB/s, dump {size / ours / 1e6:.0f} MB/s, ratio {ratios[-1]:.2f}, "
                f"memory +{memory.growth / 1e6:.0f} MB",
                flush=True,
            )
    finally:
        shutil.rmtree(scratch)
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
