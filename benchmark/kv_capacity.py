"""Does decode cost grow with the tokens seen or with the cache's capacity? python benchmark/kv_capacity.py --help."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors


@click.command(cls=OneLineErrors)
@click.option("--model_path", required=True, help="Checkpoint folder or Hub id.")
@click.option("--execute_mode", type=click.Choice(["dynamo", "eager"]), default="dynamo", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--batch_size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--position", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens already stored.")
@click.option("--capacities", default="2048,16384", show_default=True, help="Cache capacities to compare.")
@click.option("--steps", type=click.IntRange(min=1), default=16, show_default=True, help="Decode steps per round.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
def main(model_path: str, execute_mode: str, device: str, dtype: str, capacities: str, **options: Any) -> None:
    """Time decode at one position for several cache capacities, in turn, and print the ratio to the first."""
    with user_errors():
        from npu_tuned_model import UserError, load_model

        try:
            sizes = [int(size) for size in capacities.split(",")]
        except ValueError:
            raise UserError(f"--capacities is {capacities!r}; give whole numbers with commas between") from None
        model = load_model(model_path, device=device, dtype=dtype)
        if execute_mode == "dynamo":
            model.run_graph()
        compare(model, sizes, **options)


def compare(model: Any, capacities: list[int], *, batch_size: int, position: int, steps: int, rounds: int) -> None:
    """Measure and print, one line per capacity."""
    import torch

    from benchmark.metrics import Spread
    from npu_tuned_model.device import synchronize

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (batch_size, position), generator=generator).to(model.device)
    token = prompt[:, :1]
    caches = [model.new_cache(batch_size, capacity) for capacity in capacities]
    for cache in caches:
        model(prompt, past_key_values=cache)

    def milliseconds_per_step(cache: Any) -> float:
        cache.start([position] * batch_size)  # every round at the same position
        synchronize(model.device)
        start = time.perf_counter()
        for _ in range(steps):
            model(token, past_key_values=cache)
        synchronize(model.device)
        return (time.perf_counter() - start) * 1e3 / steps

    for cache in caches:
        milliseconds_per_step(cache)
    measured = [[milliseconds_per_step(cache) for cache in caches] for _ in range(rounds)]
    for index, capacity in enumerate(capacities):
        times = Spread.of([row[index] for row in measured])
        ratio = Spread.of([row[index] / row[0] for row in measured])
        click.echo(
            f"capacity {capacity:6d}: decode {times.median:.2f} ms ({times.minimum:.2f}..{times.maximum:.2f}), "
            f"x {ratio.median:.3f} ({ratio.minimum:.3f}..{ratio.maximum:.3f}) of capacity {capacities[0]}"
        )


if __name__ == "__main__":
    main()
