"""Ours beside the newest transformers (static cache, plain and compiled), in turn: a script, not a test.

    python tests/benchmark/measure_transformers5.py --model_path DIR

transformers 5 is fetched once into a folder of its own; each of its variants runs in a process of its own and waits
while another is measured. Greedy, one prompt of the README's text per row, the same loop around every model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
PACKAGE = "transformers==5.23.0"
VARIANTS = ("plain", "compiled")
Step = Callable[[Tensor, int], Tensor]


def timed_generation(step: Step, ids: Tensor, new_tokens: int) -> dict[str, Any]:
    """Prefill and the mean decode step in ms, and row 0's tokens; `step` gives the next tokens."""
    times, tokens, seen = [], [], 0
    for _ in range(new_tokens):
        start = time.perf_counter()
        ids, seen = step(ids, seen), seen + ids.shape[1]
        times.append((time.perf_counter() - start) * 1000)
        tokens.append(int(ids[0, 0]))
    decode = times[1:]
    return {"prefill_ms": times[0], "decode_ms": statistics.fmean(decode), "tokens": tokens}


def serve(given: argparse.Namespace) -> None:
    """The process of one variant: a generation and a line of JSON for every line that comes in."""
    import transformers

    model = transformers.Qwen2ForCausalLM.from_pretrained(
        given.model_path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    compiled = given.variant == "compiled"
    # two, because prefill's graph and decode's must not throw each other out
    prefill, decode = (torch.compile(model.forward, dynamic=False) if compiled else model.forward for _ in range(2))
    for line in sys.stdin:
        ids = torch.tensor(json.loads(line))
        cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + given.new_tokens)

        def step(ids: Tensor, seen: int, cache: Any = cache) -> Tensor:
            forward = decode if seen else prefill
            positions = torch.arange(seen, seen + ids.shape[1]).expand(ids.shape[0], -1)
            result = forward(input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
            return result.logits[:, -1:].argmax(-1)

        with torch.no_grad():
            print(json.dumps(timed_generation(step, ids, given.new_tokens)), flush=True)


def measure(given: argparse.Namespace) -> None:
    """Every variant in turn, and the ratios."""
    from transformers import AutoTokenizer

    from npu_tuned_model import load_model
    from npu_tuned_model.simulate.environment import cache_folder
    from npu_tuned_model.simulate.wheel import package_folder

    folder = package_folder(cache_folder(), PACKAGE)
    text = AutoTokenizer.from_pretrained(given.model_path)((REPOSITORY / "README.md").read_text() * 3)["input_ids"]
    ids = torch.tensor([text[500 * row : 500 * row + given.prompt] for row in range(given.batch_size)])
    command = [sys.executable, __file__, f"--model_path={given.model_path}", f"--new_tokens={given.new_tokens}"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {
        variant: subprocess.Popen([*command, f"--variant={variant}"], env=environment, **pipes) for variant in VARIANTS
    }
    model = load_model(given.model_path, device="cpu", dtype="bfloat16")
    model.run_graph()

    def run(name: str) -> dict[str, Any]:
        if name in processes:
            process = processes[name]
            process.stdin.write(json.dumps(ids.tolist()) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        cache = model.new_cache(given.batch_size, given.prompt + given.new_tokens)
        return timed_generation(
            lambda ids, seen: model(ids, past_key_values=cache).logits[:, -1:].argmax(-1), ids, given.new_tokens
        )

    names = ("ours", *VARIANTS)
    for name in names:
        # twice: what the first compiles, the second may compile again for other sizes
        tokens = [run(name)["tokens"] for _ in range(2)][-1]
        print(f"{name}: first tokens {tokens[:8]}", flush=True)
    rounds = [{name: run(name) for name in names} for _ in range(given.rounds)]
    for process in processes.values():
        process.stdin.close()
        process.wait()
    for key in ("prefill_ms", "decode_ms"):
        for name in names:
            values = [figures[name][key] for figures in rounds]
            print(f"{key} {name}: {statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})")
        ratios = [min(figures[variant][key] for variant in VARIANTS) / figures["ours"][key] for figures in rounds]
        print(
            f"{key}: {PACKAGE}'s better / ours {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    (serve if given.variant else measure)(given)


if __name__ == "__main__":
    main()
