"""Loading holds the weights, or a rank's part of them, and one shard."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import (
    config_of,
    load,
    weights_of,
    write_checkpoint,
)
from torch import Tensor
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import checkpoint_files
from npu_tuned_model.checkpoint_files import WeightSource

MIB = 2**20


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if str(folder) in line}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("safe_serialization", [False, True])
def test_one_shard_is_open_at_a_time(tmp_path: Path, safe_serialization: bool) -> None:
    config = config_of()
    items = list(weights_of(config).items())
    shards = [dict(items[start::4]) for start in range(4)]
    folder = write_checkpoint(tmp_path, config, shards, safe_serialization)

    def seen(source: WeightSource) -> Iterator[set[str]]:
        for _, tensor in source:
            yield mapped_files(folder)
            del tensor

    source = WeightSource(folder)
    assert not mapped_files(folder)
    open_files = list(seen(source))
    assert all(len(files) == 1 for files in open_files)
    assert len(set.union(*open_files)) == 4
    assert not mapped_files(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("safe_serialization", [False, True])
def test_loading_closes_a_shard_before_it_opens_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe_serialization: bool
) -> None:
    items = list(weights_of(config_of()).items())
    folder = write_checkpoint(tmp_path, config_of(), [dict(items[start::4]) for start in range(4)], safe_serialization)
    place, name = (checkpoint_files, "safe_open") if safe_serialization else (torch, "load")
    open_shard = getattr(place, name)
    open_before: list[set[str]] = []

    def observed(*args: object, **kwargs: object) -> object:
        open_before.append(mapped_files(folder))
        return open_shard(*args, **kwargs)

    monkeypatch.setattr(place, name, observed)
    load(folder)
    assert open_before == [set()] * 8  # four shards, their headers first


MEASURE = """
import sys
from pathlib import Path
import torch
from checkpoints import empty_model
from npu_tuned_model.checkpoint import load_weights
from npu_tuned_model.checkpoint_layout import WHOLE, Shard
from npu_tuned_model.config import read_config
from npu_tuned_model.linear_int8 import hold_int8
from npu_tuned_model.tensor_parallel import TensorParallel, shard_model

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])

folder, shard = Path(sys.argv[1]), Shard(int(sys.argv[2]), int(sys.argv[3]))
model = empty_model(read_config(folder))
int8 = sys.argv[4:] == ["int8"]
if shard != WHOLE:
    shard_model(model, TensorParallel(*shard))
if int8:
    hold_int8(model, embeddings=True)
before = kilobytes("VmRSS")
load_weights(model, folder, dtype=torch.float32, device=torch.device("cpu"), shard=shard)
print((kilobytes("VmHWM") - before) * 1024)
"""


def large_checkpoint(tmp_path: Path) -> tuple[Path, int, int]:
    """A checkpoint in shards of float32 ones; the bytes of its largest shard and of all of it."""
    config = config_of(heads=8, kv_heads=4, head_dim=64, layers=6)
    config.intermediate_size, config.vocab_size = 2048, 16384
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in StockQwen2(config).state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 16 * MIB:
            shards.append({})
        shards[-1][name] = torch.ones(shape)
    largest = max(sum(tensor.nbytes for tensor in shard.values()) for shard in shards)
    weights = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    folder = write_checkpoint(tmp_path / "large", config, shards)
    del shards
    return folder, largest, weights


def peak_bytes(folder: Path, *arguments: object) -> int:
    """Memory that loading takes beside what the process had, at most."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), *map(str, arguments)],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def least_peak_bytes(limit: float, folder: Path, *arguments: object) -> int:
    """The first of three peaks within the limit, else the least: what a busy system has taken away from an idle process
    comes back while it loads, and would count as memory that loading takes."""
    peaks: list[int] = []
    while len(peaks) < 3 and (not peaks or peaks[-1] > limit):
        peaks.append(peak_bytes(folder, *arguments))
    return min(peaks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("shard", [(0, 1), (1, 4)])
def test_peak_memory_is_a_ranks_weights_and_one_shard(tmp_path: Path, shard: tuple[int, int]) -> None:
    folder, largest, weights = large_checkpoint(tmp_path)
    allocator = 16 * MIB  # what the allocator and the first use of a library take, whatever the size of the model
    share = weights / shard[1]
    limit = 1.1 * (share + largest) + allocator
    assert share < least_peak_bytes(limit, folder, *shard) <= limit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("shard", [(0, 1), (1, 4)])
def test_peak_memory_of_int8_weights_is_theirs_and_a_few_rows(tmp_path: Path, shard: tuple[int, int]) -> None:
    folder, largest, weights = large_checkpoint(tmp_path)
    share = weights / 4 / shard[1]
    # a few rows as they are read, as float32 and rounded, and what the allocator takes; no whole tensor, no shard
    few_rows = 16 * MIB
    assert few_rows < largest
    limit = 1.1 * share + few_rows
    assert share < least_peak_bytes(limit, folder, *shard, "int8") <= limit
