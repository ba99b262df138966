"""tools/merge_qkv_weight.py as a process of its own, on a large checkpoint: interrupted, and in how much memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, weights_of, write_checkpoint
from models import stock_model
from torch import Tensor

TOOL = Path(__file__).resolve().parents[2] / "tools" / "merge_qkv_weight.py"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB in shards of 50 MB."""
    config = config_of(heads=8, kv_heads=2, head_dim=64, layers=24)
    config.intermediate_size = 2304
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in stock_model(config).state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 40 * 2**20:
            shards.append({})
        shards[-1][name] = torch.full(shape, 0.5)
    return write_checkpoint(tmp_path_factory.mktemp("large") / "model", config, shards)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def start(*arguments: object, script: Path = TOOL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="signals and peak memory as Linux has them")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_conversion_leaves_nothing_that_loads(large: Path, tmp_path: Path, number: int) -> None:
    # Slowed down, or it may be done before a busy machine runs this process again. And interrupts as a terminal's user
    # has them: what a shell starts in the background, these tests included, is started without.
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import runpy, signal, sys, time\n"
        "from rich.progress import Progress\n"
        "Progress.advance = lambda *arguments: time.sleep(0.05)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = (f"--model_path={large}", f"--output_path={tmp_path / 'out'}", "--max_shard_size=20MB")
    tool = start(TOOL, *options, script=slow)
    while tool.poll() is None and not list(tmp_path.glob(".out-*/model-00003-*")):
        time.sleep(0.001)
    tool.send_signal(number)
    tool.communicate()
    assert tool.returncode != 0
    assert not (tmp_path / "out").exists()
    for folder in tmp_path.glob(".out-*"):
        assert number == signal.SIGKILL
        assert not (folder / "config.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="signals and peak memory as Linux has them")
def test_peak_memory_is_below_two_shards_beside_what_python_needs(large: Path, tmp_path: Path) -> None:
    def peak(*arguments: object) -> int:
        tool = start(*arguments)
        _, status, usage = os.wait4(tool.pid, 0)
        assert status == 0
        return usage.ru_maxrss * 1024

    small = write_checkpoint(tmp_path / "small", config_of(), [weights_of(config_of())])
    base = peak(f"--model_path={small}", f"--output_path={tmp_path / 'base'}", "--verify")
    most = peak(
        f"--model_path={large}", f"--output_path={tmp_path / 'out'}", "--tp_size=2", "--verify", "--max_shard_size=50MB"
    )
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 350e6
    assert most - base < 100e6
