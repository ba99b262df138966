"""How far are the logits from a float32 reference, ours and stock's? python benchmark/logit_error.py --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors


@click.command(cls=OneLineErrors)
@click.option("--model_path", required=True, help="Checkpoint folder or Hub id.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--length", type=click.IntRange(min=8), default=384, show_default=True, help="Tokens per text, at most.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Texts: a UTF-8 file with one per line, or a JSON list of strings. Default: those of benchmark.quality.",
)
def main(model_path: str, device: str, dtype: str, length: int, prompts: Path | None) -> None:
    """Mean absolute logit difference and top-1 agreement with stock transformers in float32, on real text.

    Stock (eager, sdpa) and tuned (eager, graph; prefill and one-token decode steps) see the same texts; decode starts
    at a quarter of each text.
    """
    with user_errors():
        import torch

        from benchmark.generate import load_stock
        from benchmark.quality import TEXT, read_passages
        from benchmark.workload import load_tokenizer, read_prompts
        from npu_tuned_model import TuningOptions, load_model
        from npu_tuned_model.config import read_config, resolve_checkpoint
        from npu_tuned_model.device import resolve_device, resolve_dtype

        where, kind = resolve_device(device), resolve_dtype(dtype)
        folder = resolve_checkpoint(model_path)
        read_config(folder)
        tokenizer = load_tokenizer(folder)
        texts = read_passages(TEXT) if prompts is None else read_prompts(prompts)
        ids = [tokenizer(text, return_tensors="pt").input_ids[:, :length].to(where) for text in texts]
        ids = [row for row in ids if row.shape[1] >= 8]
        stock = load_stock(folder, device=where, dtype=torch.float32)
        reference = [stock_logits(stock[0], row) for row in ids]
        del stock
        for subject in load_stock(folder, device=where, dtype=kind):
            report(f"{subject.name}", reference, [stock_logits(subject, row) for row in ids])
        model = load_model(folder, device=where, dtype=kind, options=TuningOptions().replace(last_token_logits=False))
        for mode in ("eager", "graph"):
            if mode == "graph":
                model.run_graph()
            report(f"tuned {mode}, prefill", reference, [model(row).logits for row in ids])
            report(f"tuned {mode}, decode", reference, [decode_logits(model, row) for row in ids])


def stock_logits(subject: Any, ids: Any) -> Any:
    """(1, sequence, vocabulary) float32."""
    import torch

    subject.use()
    with torch.no_grad():
        return subject.model(ids).logits.float()


def decode_logits(model: Any, ids: Any, start: int | None = None) -> Any:
    """The same from a prefill of the first `start` tokens (a quarter) and one decode step for every later token."""
    import torch

    start = start or ids.shape[1] // 4
    cache = model.new_cache(1, ids.shape[1])
    parts = [model(ids[:, :start], past_key_values=cache).logits]
    parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(start, ids.shape[1])]
    return torch.cat(parts, dim=1)


def report(name: str, reference: list[Any], found: list[Any]) -> None:
    """One line: the means over all tokens of all texts."""
    tokens = sum(logits.shape[1] for logits in reference)
    error = sum((ours - theirs).abs().mean(-1).sum().item() for ours, theirs in zip(found, reference)) / tokens
    same = sum((ours.argmax(-1) == theirs.argmax(-1)).sum().item() for ours, theirs in zip(found, reference)) / tokens
    click.echo(f"{name:22s} mean |logit error| {error:.4f}   top-1 agreement {same:.4f}   ({tokens} tokens)")


if __name__ == "__main__":
    main()
