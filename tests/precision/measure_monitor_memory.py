"""What watching costs in memory: how much higher the peak of training steps and of generation is, on Linux.

    python tests/precision/measure_monitor_memory.py [--rounds 7] [--model_path DIR --tokens 24]

Prints, per setting, the median of the rounds' differences from the plain run of the same round, with its range, in
percent of the model's bytes. Measured is the most resident memory of the process while it runs. --model_path trains a
real checkpoint as well, and generates with it.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable

import click
import torch
from measure_monitor import OPS, SETTINGS, TWO_LAYERS, small_model

from precision.monitor import Monitor

SEQUENCE = 64
# what a monitor of generation is asked for
GENERATION: dict[str, dict[str, Any]] = {
    "two layers": {"targets": TWO_LAYERS},
    "everything": {"all_xy": True, "generation": True},
}


def peak(work: Callable[[], Any]) -> int:
    """Most resident bytes while it runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # sets the process's high-water mark back
    Path("/proc/self/clear_refs").write_text("5")
    work()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def compare(
    name: str, model: torch.nn.Module, plain: Callable[[], Any], watched: Callable[[], Any], rounds: int
) -> None:
    """Run both once per round and print the difference."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    for run in (plain, watched):
        run()
    shares = []
    for number in range(rounds):
        first, second = (plain, watched) if number % 2 == 0 else (watched, plain)
        peaks = {first: peak(first), second: peak(second)}
        shares.append(100 * (peaks[watched] - peaks[plain]) / size)
    print(
        f"{name}: {statistics.median(shares):+.2f} % of {size / 2**20:.0f} MiB "
        f"({min(shares):+.2f} .. {max(shares):+.2f})",
        flush=True,
    )


def training(name: str, model: Any, settings: dict[str, dict[str, Any]], scratch: Path, rounds: int) -> None:
    """Two steps each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, model.config.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))

    def plain() -> None:
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for setting, options in settings.items():

        def watched(options: dict[str, Any] = options) -> None:
            with Monitor(output_dir=scratch, quiet=True, page=False, ops=OPS, **options).watch(model, optimizer):
                plain()

        compare(f"training, {name}, {setting}", model, plain, watched, rounds)


def generating(model_path: str, tokens: int, scratch: Path, rounds: int) -> None:
    from npu_tuned_model import load_model

    model = load_model(model_path, dtype=torch.bfloat16)
    model.run_eager()
    ids = torch.randint(0, 10_000, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))

    def plain() -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    for setting, options in GENERATION.items():

        def watched(options: dict[str, Any] = options) -> None:
            with Monitor(output_dir=scratch, quiet=True, page=False, ops=OPS, **options).watch(model):
                plain()

        compare(f"generation, {setting}", model, plain, watched, rounds)


@click.command()
@click.option("--rounds", default=7)
@click.option("--model_path", default=None)
@click.option("--tokens", default=24)
def main(rounds: int, model_path: str | None, tokens: int) -> None:
    from transformers import Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    scratch = Path(tempfile.mkdtemp(prefix="monitor-memory-"))
    training("4 layers", small_model(), SETTINGS, scratch, rounds)
    if model_path:
        generating(model_path, tokens, scratch, rounds)
        model = Qwen2ForCausalLM.from_pretrained(model_path, torch_dtype=torch.bfloat16)
        training("the checkpoint", model, {"everything": SETTINGS["everything"]}, scratch, rounds)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
