"""What a dump costs: the forward pass alone, with ours, and with msprobe's, in turn in one process.

    python tests/precision/measure_overhead.py --model_path DIR [--tokens 128] [--rounds 5] [--clock cpu] [--peer]

Prints, per setting, the median ratio to the plain forward and its range over the rounds; by CPU time on a machine that
others use as well. --peer needs msprobe
(pip install mindstudio-probe) in the same environment, and transformers' stock model is measured.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from precision import PrecisionDebugger

SETTINGS: dict[str, dict[str, Any]] = {
    "statistics L0": {"level": "L0"},
    "statistics L1": {"level": "L1"},
    "statistics mix": {"level": "mix"},
    "checksum L1": {"level": "L1", "summary_mode": "md5"},
}
TENSOR = {"level": "L1", "task": "tensor"}


def ours(folder: Path, setting: dict[str, Any]) -> Any:
    return PrecisionDebugger(dump_path=folder, quiet=True, **setting)


def ours_compressed(folder: Path, setting: dict[str, Any]) -> Any:
    return ours(folder, {**setting, "compress": True})


def peers(folder: Path, setting: dict[str, Any]) -> Any:
    from msprobe.pytorch import PrecisionDebugger as Peer

    task = setting.get("task", "statistics")
    part = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": setting.get("summary_mode", "statistics")}
    config = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": setting["level"], task: part}
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config))
    # a singleton: each setting needs a new one
    for kind in Peer.__mro__:
        if getattr(kind, "_instance", None) is not None:
            kind._instance = None
    return Peer(config_path=str(path))


def step(debugger: Any, model: torch.nn.Module, run: Callable[[], Any]) -> None:
    debugger.start(model=model)
    run()
    debugger.stop()
    debugger.step()


@click.command()
@click.option("--model_path", required=True)
@click.option("--tokens", default=128)
@click.option("--rounds", default=5)
@click.option("--peer", is_flag=True)
@click.option("--threads", default=1)
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", help="cpu: this process's time only.")
@click.option("--dtype", default="bfloat16")
@click.option("--tensor", is_flag=True, help="Also the first dump of whole tensors: seconds and bytes.")
@click.option("--decode", default=0, help="With --tensor: forward passes of one token that the step has as well.")
@click.option("--only", default="", help="Part of a setting's name.")
def main(
    model_path: str,
    tokens: int,
    rounds: int,
    peer: bool,
    threads: int,
    clock: str,
    dtype: str,
    tensor: bool,
    decode: int,
    only: str,
) -> None:
    torch.set_num_threads(threads)
    now = time.process_time if clock == "cpu" else time.perf_counter
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(model_path, torch_dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run() -> None:
        model(ids)

    @torch.no_grad()
    def generate() -> None:
        result = model(ids)
        for _ in range(decode):
            result = model(ids[:, :1], past_key_values=result.past_key_values)

    def timed(work: Callable[[], Any]) -> float:
        start = now()
        work()
        return now() - start

    tools = {"ours": ours, **({"peer": peers} if peer else {})}
    scratch = Path(tempfile.mkdtemp(prefix="overhead-"))
    run()
    for name, setting in SETTINGS.items():
        if only not in name:
            continue
        ratios: dict[str, list[float]] = {tool: [] for tool in tools}
        stopped: list[float] = []
        debuggers = {}
        for tool, make in tools.items():
            debuggers[tool] = make(scratch / f"{tool}-{name.replace(' ', '-')}", setting)
            step(debuggers[tool], model, run)
        plain = []
        for _ in range(rounds):
            plain.append(timed(run))
            for tool in tools:
                ratios[tool].append(timed(lambda debugger=debuggers[tool]: step(debugger, model, run)))
            stopped.append(timed(run))
        base = statistics.median(plain + stopped)
        for tool, times in ratios.items():
            values = sorted(value / base for value in times)
            print(
                f"{name:16} {tool}: {statistics.median(values):.2f} ({values[0]:.2f} .. {values[-1]:.2f})", flush=True
            )
        values = sorted(value / statistics.median(plain) for value in stopped)
        print(f"{'':16} plain forward {1000 * base:.0f} ms, after stop() {statistics.median(values):.2f}", flush=True)
    if tensor:
        first: dict[str, int] = {}
        for tool, make in {"peer": tools.get("peer"), "ours": ours, "ours, compressed": ours_compressed}.items():
            if make is None:
                continue
            folder = scratch / f"{tool}-tensor"
            debugger = make(folder, TENSOR)
            known: set[int] = set()
            for number in range(2):
                seconds = timed(lambda debugger=debugger: step(debugger, model, generate))
                files = {path.stat().st_ino: path.stat().st_size for path in (folder / f"step{number}").rglob("*.pt")}
                size = sum(value for inode, value in files.items() if inode not in known)
                known |= files.keys()
                first.setdefault(tool, size)
                share = f", {100 * size / first['peer']:.1f} % of the peer's first" if "peer" in first else ""
                print(f"tensor L1 {tool}, step {number}: {seconds:.2f} s, {size / 1e6:.0f} MB new{share}", flush=True)
            shutil.rmtree(folder)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
