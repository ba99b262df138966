"""What watching costs: training steps and generation alone, with our monitor, and with msprobe's two, in turn in one
process.

    python tests/precision/measure_monitor.py [--rounds 7] [--peer] [--model_path DIR --tokens 24] [--only WORDS]

Prints, per setting, the median of the rounds' ratios to the plain run of the same round, with its range, of CPU time
and of wall time, and the median of the differences in CPU time. "plain again" is the plain run a second time: how far
from 1 it is tells what the rest can be trusted with. Two things are kept from deciding the ratios: where a model's
weights lie in memory (all tools train the same ones; two models without any monitor differ by up to 5 %), and pages
that malloc gives back after one step and has to fetch in another (it keeps them; Linux only).

--peer needs msprobe (pip install mindstudio-probe) in the same environment. --model_path adds
generation with a real checkpoint, of the tuned model (eager) and of stock transformers.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from precision.monitor import Monitor

OPS = ["norm", "min", "max", "mean", "zeros", "nans"]
TWO_LAYERS = {"model.layers.0": {}, "model.layers.2": {}}
SETTINGS: dict[str, dict[str, Any]] = {
    "two layers": {"targets": TWO_LAYERS, "xy_distribution": True},
    "all modules forward": {"all_xy": True, "xy_distribution": True, "forward_only": True},
    "all modules": {"all_xy": True, "xy_distribution": True},
    "weight gradients": {"wg_distribution": True},
    "moments": {"mv_distribution": True},
    "parameters": {"param_distribution": True},
    "everything": {
        "all_xy": True,
        "xy_distribution": True,
        "wg_distribution": True,
        "mv_distribution": True,
        "param_distribution": True,
    },
}
# malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# the parts of the peer's second monitor that exist there, and its five figures
SECOND = {
    "all modules": ("module",),
    "weight gradients": ("weight_grad",),
    "moments": ("optimizer",),
    "parameters": ("param",),
    "everything": ("module", "weight_grad", "optimizer", "param"),
}


def attach_ours(folder: Path, setting: dict[str, Any], model: Any, optimizer: Any) -> Callable[[], None]:
    Monitor(output_dir=folder, quiet=True, ops=OPS, **setting).watch(model, optimizer)
    return lambda: None


def attach_first(folder: Path, setting: dict[str, Any], model: Any, optimizer: Any) -> Callable[[], None]:
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
    from msprobe.pytorch import TrainerMon

    path = folder.with_suffix(".json")
    path.write_text(json.dumps({"targets": {}, "ops": OPS, "format": "csv", **setting}))
    TrainerMon(str(path), params_have_main_grad=False).set_monitor(model, optimizer, grad_acc_steps=1)
    return lambda: None


def attach_second(folder: Path, parts: tuple[str, ...], model: Any, optimizer: Any) -> Callable[[], None]:
    from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

    folder.mkdir(parents=True)
    monitors = {
        name: {"enabled": name in parts, "ops": ["norm", "min", "max", "mean", "nans"]}
        for name in ("module", "weight_grad", "optimizer", "param")
    }
    path = folder.with_suffix(".json")
    path.write_text(json.dumps({"framework": "pytorch", "output_dir": str(folder), "monitors": monitors}))
    monitor = TrainerMonitorV2(str(path))
    monitor.start(model=model, optimizer=optimizer, grad_acc_steps=1)
    return monitor.step


def keep_freed_memory() -> None:
    """What a step frees stays in the process."""
    library = ctypes.CDLL(None)
    if not library.mallopt(M_MMAP_MAX, 0) or not library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1):
        raise click.ClickException("malloc can't be told to keep its memory")


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(name: str, runs: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Run every tool once per round and print the ratios to the round's plain run."""
    for run in runs.values():
        run()
    times: dict[str, list[tuple[float, float]]] = {tool: [] for tool in runs}
    for number in range(rounds):
        # what a run finds in the caches depends on which was before it
        for tool in random.Random(number).sample(list(runs), len(runs)):
            times[tool].append(timed(runs[tool]))
    plain = statistics.median(cpu for cpu, _ in times["plain"])
    spread = [min(cpu for cpu, _ in times["plain"]) / plain, max(cpu for cpu, _ in times["plain"]) / plain]
    print(f"{name}: plain {1000 * plain:.0f} ms CPU ({spread[0]:.2f} .. {spread[1]:.2f})", flush=True)
    for tool in runs:
        if tool == "plain":
            continue
        texts = []
        for kind in (0, 1):
            ratios = sorted(watched[kind] / alone[kind] for watched, alone in zip(times[tool], times["plain"]))
            texts.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})")
        more = statistics.median(watched[0] - alone[0] for watched, alone in zip(times[tool], times["plain"]))
        print(f"    {tool:12} CPU {texts[0]}   wall {texts[1]}   CPU {1000 * more:+.2f} ms", flush=True)


def small_model() -> Any:
    """Four layers, bfloat16, 45 MiB."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config).bfloat16()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def training(scratch: Path, settings: dict[str, dict[str, Any]], rounds: int, peer: bool) -> None:
    torch.manual_seed(0)
    blank = small_model()
    ids = torch.randint(0, blank.config.vocab_size, (1, 256))
    states = optimizer_of(blank)
    blank(ids, labels=ids).loss.backward()
    states.step()
    states.zero_grad()

    def trainer(attach: Callable[[Any, Any], Callable[[], None]]) -> Callable[[], None]:
        model = copy.deepcopy(blank)
        optimizer = optimizer_of(model)
        for shared, parameter in zip(blank.parameters(), model.parameters()):
            parameter.data = shared.data
            optimizer.state[parameter] = states.state[shared]
        after = attach(model, optimizer)

        def step() -> None:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            after()
            optimizer.zero_grad()

        return step

    plain, again = (trainer(lambda model, optimizer: lambda: None) for _ in range(2))
    for name, setting in settings.items():
        folder = scratch / name.replace(" ", "-")
        runs: dict[str, Callable[[], Any]] = {
            "plain": plain,
            "plain again": again,
            "ours": trainer(partial(attach_ours, folder, setting)),
        }
        if peer:
            first = folder.with_name(folder.name + "-first")
            runs["msprobe v1"] = trainer(partial(attach_first, first, setting))
            if name in SECOND:
                second = folder.with_name(folder.name + "-second")
                runs["msprobe v2"] = trainer(partial(attach_second, second, SECOND[name]))
        compare(name, runs, rounds)


def generating(scratch: Path, model_path: str, tokens: int, rounds: int, only: str) -> None:
    from transformers import Qwen2ForCausalLM as Stock

    from npu_tuned_model import load_model

    settings: dict[str, dict[str, Any]] = {
        "two layers": {"targets": TWO_LAYERS},
        "all modules": {"all_xy": True},
        "generation": {"generation": True},
        "everything": {"all_xy": True, "generation": True},
    }
    for kind in ("tuned eager", "stock"):
        if kind == "stock":
            model: Any = Stock.from_pretrained(model_path, torch_dtype=torch.bfloat16).eval()
        else:
            model = load_model(model_path, dtype=torch.bfloat16)
            model.run_eager()
        ids = torch.randint(0, 10_000, (1, 64), generator=torch.Generator().manual_seed(0))

        def generate(model: Any = model, ids: torch.Tensor = ids) -> None:
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

        def with_monitor(setting: dict[str, Any], model: Any = model, run: Callable[[], None] = generate) -> None:
            folder = scratch / "generation"
            with Monitor(output_dir=folder, quiet=True, page=False, ops=OPS, **setting).watch(model):
                run()

        for name, setting in settings.items():
            if only not in f"generation {name}":
                continue
            runs: dict[str, Callable[[], Any]] = {
                "plain": generate,
                "plain again": generate,
                "ours": lambda setting=setting: with_monitor(setting),
            }
            compare(f"generation, {kind}, {name}", runs, rounds)


@click.command()
@click.option("--rounds", default=7)
@click.option("--peer", is_flag=True)
@click.option("--model_path", default=None)
@click.option("--tokens", default=24)
@click.option("--threads", default=1)
@click.option("--only", default="", help="Part of a setting's name; 'generation' for generation alone.")
def main(rounds: int, peer: bool, model_path: str | None, tokens: int, threads: int, only: str) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    scratch = Path(tempfile.mkdtemp(prefix="monitor-overhead-"))
    settings = {name: setting for name, setting in SETTINGS.items() if only in name}
    training(scratch, settings, rounds, peer)
    if model_path:
        generating(scratch, model_path, tokens, rounds, only)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
