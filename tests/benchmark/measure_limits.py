"""How far the tuned model is from what the machine allows, everything in turn in one process: a script, not a test.

    python tests/benchmark/measure_limits.py --model_path DIR [--prompt 1024] [--rounds 15]

Decode, with bfloat16 and with int8 weights, beside a read of the bfloat16 ones; prefill at batch 1 beside its matmuls
alone. A round's figures are medians of a few calls in a row, the first not counted, reads and matmuls before and after.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmark.command  # noqa: F401  sets what torch reads when it is imported, as for the benchmark

# isort: split
import torch

from npu_tuned_model import load_model
from npu_tuned_model.work import work_of

STEPS = 12
READS = 4
PREFILLS = 2
BATCHES = (1, 4)


def milliseconds(count: int, call: Callable[..., object], *arguments: object) -> list[float]:
    """The times of `count` calls in a row; one more before them isn't counted."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        call(*arguments)
        times.append((time.perf_counter() - start) * 1000)
    return times[1:]


def prefill_matmuls(model: Any, length: int) -> Callable[[], None]:
    """The matmuls of a prompt of `length` tokens in the model's own packed weights, and nothing else."""
    layer = model.model.layers[0]
    dtype = model.model.norm.weight.dtype
    hidden = torch.randn(length, model.config.hidden_size).to(dtype)
    context = torch.randn(length, layer.self_attn.o_proj.in_features).to(dtype)
    activated = torch.randn(length, model.config.intermediate_size).to(dtype)

    def run() -> None:
        for layer in model.model.layers:
            layer.self_attn.qkv(hidden)
            layer.self_attn.o_proj(context)
            layer.mlp.gate_up_proj(hidden)
            layer.mlp.down_proj(activated)
        model.lm_head(hidden[:1])

    return run


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    models = {
        name: load_model(given.model_path, device="cpu", dtype="bfloat16", weight_dtype=weight_dtype)
        for name, weight_dtype in (("bfloat16", None), ("int8", "int8"))
    }
    config = models["bfloat16"].config
    work = work_of(config, dtype=torch.bfloat16, batch=1, length=given.prompt)
    buffer = torch.ones(work.step_weight_bytes // 4)
    matmuls = prefill_matmuls(models["bfloat16"], given.prompt)
    prompt = torch.randint(0, config.vocab_size, (1, given.prompt))
    token = {batch: torch.full((batch, 1), 5) for batch in BATCHES}
    caches = {}
    for name, model in models.items():
        model.run_graph()
        for batch in BATCHES:
            caches[name, batch] = model.new_cache(batch, given.prompt + (given.rounds + 1) * (STEPS + 1))
            model(prompt.expand(batch, -1), past_key_values=caches[name, batch])

    def decode(name: str, batch: int) -> None:
        models[name](token[batch], past_key_values=caches[name, batch])

    def prefill() -> None:
        models["bfloat16"](prompt, past_key_values=models["bfloat16"].new_cache(1, given.prompt + 1))

    times: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for turn in range(given.rounds + 1):
        reads = milliseconds(READS, buffer.sum)
        now = {}
        for name, batch in caches:
            now[f"decode, {name}, batch {batch}"] = statistics.median(milliseconds(STEPS, decode, name, batch))
        reads += milliseconds(READS, buffer.sum)
        alone = milliseconds(PREFILLS, matmuls)
        now["prefill, bfloat16, batch 1"] = statistics.median(milliseconds(PREFILLS, prefill))
        alone += milliseconds(PREFILLS, matmuls)
        now["a read of the bfloat16 weights"] = read = statistics.median(reads)
        now["the matmuls of that prefill"] = matmul = statistics.median(alone)
        if turn == 0:  # a warm-up
            continue
        for label, value in now.items():
            times.setdefault(label, []).append(value)
            ratios.setdefault(label, []).append(value / (read if label.startswith("decode") else matmul))
    for label, values in times.items():
        line = f"{label}: {spread(values)} ms"
        if label.startswith("decode"):
            line += f", {spread(ratios[label])} reads"
        if label.startswith("prefill"):
            line += f", {spread(ratios[label])} times its matmuls"
        print(line)


def spread(values: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


if __name__ == "__main__":
    main()
