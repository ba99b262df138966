"""What int8 weights cost in quality: perplexity, and greedy tokens kept. python -m benchmark.quality --help."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmark.command import OneLineErrors, user_errors
from benchmark.logit_error import decode_logits

TEXT = Path(__file__).with_name("quality_text.txt")
SEPARATOR = "==="


class Quality(NamedTuple):
    """One model's results; counts where a share follows from them.

    Attributes:
        perplexity: of the texts' tokens, as the model computes prompts.
        kept, generated: of the tokens that the reference generates, one after the other, those that the model takes for
            the best as well when it has seen the same tokens before.
        agreed, read: of all places in the texts, those at which the model has the reference's best next token.
    """

    perplexity: float
    kept: int
    generated: int
    agreed: int
    read: int


@click.command(cls=OneLineErrors)
@click.option("--model_path", required=True, help="Checkpoint folder or Hub id, plain.")
@click.option("--quantised_path", help="Measure this checkpoint, not one quantised while loading.")
@click.option("--int8_embeddings/--no_int8_embeddings", default=True, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--length", type=click.IntRange(min=8), default=512, show_default=True, help="Tokens per text, at most.")
@click.option("--new_tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Generated per text.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    default=TEXT,
    help=f"UTF-8 file, texts parted by lines of {SEPARATOR!r}. Default: English, Chinese and code, with the tool.",
)
def main(
    model_path: str,
    quantised_path: str | None,
    int8_embeddings: bool,
    device: str,
    dtype: str,
    length: int,
    new_tokens: int,
    text: Path,
) -> None:
    """Compare a model with int8 weights to the same model without, on texts and on what the latter generates.

    Exits with 1 where perplexity rises by more than 1 % or less than 97 % of the greedy tokens are kept.
    """
    with user_errors():
        from benchmark.workload import load_tokenizer
        from npu_tuned_model import TuningOptions, load_model
        from npu_tuned_model.config import read_config, resolve_checkpoint
        from npu_tuned_model.device import resolve_device, resolve_dtype

        folder, where, kind = resolve_checkpoint(model_path), resolve_device(device), resolve_dtype(dtype)
        read_config(folder)
        tokenizer = load_tokenizer(folder)
        ids = [
            tokenizer(passage, return_tensors="pt").input_ids[:, :length].to(where) for passage in read_passages(text)
        ]
        options = TuningOptions().replace(last_token_logits=False)
        reference = load_model(folder, device=where, dtype=kind, options=options)
        if quantised_path is None:
            model = load_model(
                folder,
                device=where,
                dtype=kind,
                options=options,
                weight_dtype="int8",
                int8_embeddings=int8_embeddings,
            )
        else:
            model = load_model(quantised_path, device=where, dtype=kind, options=options)
        # the reference against itself: what one of its paths says of the other's tokens
        results = {dtype: measure(reference, reference, ids, new_tokens)}
        results["int8"] = measure(model, reference, ids, new_tokens)
    for name, result in results.items():
        click.echo(line(name, result))
    change = results["int8"].perplexity / results[dtype].perplexity - 1
    kept = results["int8"].kept / results["int8"].generated
    click.echo(f"perplexity {change:+.2%}, {kept:.2%} of the greedy tokens kept")
    if change > 0.01 or kept < 0.97:
        raise click.ClickException("int8 weights cost this model more than 1 % in perplexity or 3 % of its tokens")


def read_passages(file: Path) -> list[str]:
    """The texts of a file.

    Raises:
        UserError: it can't be read, or holds none.
    """
    from npu_tuned_model.errors import UserError

    try:
        whole = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} can't be read as UTF-8 text: {error}") from None
    passages = [passage.strip() for passage in whole.split(f"\n{SEPARATOR}\n")]
    if not all(passages):
        raise UserError(f"{file} holds an empty text; texts are parted by lines of {SEPARATOR!r}")
    return passages


def measure(model: Any, reference: Any, ids: list[Any], new_tokens: int) -> Quality:
    """Both models compute the logits of all tokens; ids: (1, sequence) each, at least 8 tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    loss, counts = 0.0, [0, 0, 0, 0]
    with torch.no_grad():
        for row in ids:
            logits = model(row).logits[0]
            loss += cross_entropy(logits[:-1], row[0, 1:], reduction="sum").item()
            best = logits.argmax(-1)
            agreed = best == reference(row).logits[0].argmax(-1)
            # a quarter of the text is the prompt, as in decode_logits
            start = max(row.shape[1] // 4, 1)
            told = reference.generate(
                row[:, :start], max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
            own = decode_logits(model, told, start)[0].argmax(-1)
            kept = own[start - 1 : -1] == told[0, start:]
            for index, count in enumerate((kept.sum().item(), kept.numel(), agreed.sum().item(), agreed.numel())):
                counts[index] += int(count)
    return Quality(math.exp(loss / sum(row.shape[1] - 1 for row in ids)), *counts)


def line(name: str, result: Quality) -> str:
    """One model's results in words."""
    return (
        f"{name:10s} perplexity {result.perplexity:8.4f}   greedy tokens kept {result.kept}/{result.generated} "
        f"({result.kept / result.generated:.2%})   same best token on the texts {result.agreed}/{result.read} "
        f"({result.agreed / result.read:.2%})"
    )


if __name__ == "__main__":
    main()
