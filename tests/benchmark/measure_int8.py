"""Decode with bfloat16 and with int8 weights beside a read of the bfloat16 ones, in turn: a script, not a test.

    python tests/benchmark/measure_int8.py --model_path DIR [--prompt 128] [--rounds 15]

A read is the median of a few before and after the round's steps; a decode time is the median of the round's steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmark.command  # noqa: F401  sets what torch reads when it is imported, as for the benchmark

# isort: split
import torch

from npu_tuned_model import load_model
from npu_tuned_model.work import work_of

STEPS = 12
READS = 4
BATCHES = (1, 4)


def reads_ms(buffer: torch.Tensor) -> list[float]:
    """A few reads, the first not counted."""
    times = []
    for _ in range(READS + 1):
        start = time.perf_counter()
        buffer.sum()
        times.append((time.perf_counter() - start) * 1000)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    models = {
        name: load_model(given.model_path, device="cpu", dtype="bfloat16", weight_dtype=weight_dtype)
        for name, weight_dtype in (("bfloat16", None), ("int8", "int8"))
    }
    config = models["bfloat16"].config
    work = work_of(config, dtype=torch.bfloat16, batch=1, length=given.prompt)
    buffer = torch.ones(work.step_weight_bytes // 4)
    token = {batch: torch.full((batch, 1), 5) for batch in BATCHES}
    times: dict[tuple[str, int], list[float]] = {(name, batch): [] for name in models for batch in BATCHES}
    reads = []
    with torch.no_grad():
        caches = {}
        for name, batch in times:
            models[name].run_graph()
            ids = torch.randint(0, config.vocab_size, (batch, given.prompt))
            caches[name, batch] = models[name].new_cache(batch, given.prompt + (given.rounds + 1) * STEPS)
            models[name](ids, past_key_values=caches[name, batch])
        for _ in range(given.rounds + 1):
            before = reads_ms(buffer)
            for name, batch in times:
                steps = []
                for _ in range(STEPS):
                    start = time.perf_counter()
                    models[name](token[batch], past_key_values=caches[name, batch])
                    steps.append((time.perf_counter() - start) * 1000)
                times[name, batch].append(statistics.median(steps))
            reads.append(statistics.median(before + reads_ms(buffer)))
    print(f"one read of the bfloat16 weights: {statistics.median(reads[1:]):.2f} ms")
    for (name, batch), all_rounds in times.items():
        # the first round is a warm-up
        values, ratios = all_rounds[1:], [step / read for step, read in zip(all_rounds[1:], reads[1:])]
        for unit, figures in (("ms", values), ("reads", ratios)):
            spread = f"{min(figures):.2f} .. {max(figures):.2f}"
            print(f"{name}, batch {batch}: {statistics.median(figures):.2f} ({spread}) {unit}")


if __name__ == "__main__":
    main()
