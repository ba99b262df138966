"""Is the tuned model right? One command, one page, one exit status: python tools/check_precision.py --help."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors

PROMPTS = (
    "Explain in two sentences why the sea is salty, and what happens to the salt when the water evaporates.",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number, iteratively."""\n',
    "请用三句话介绍一下长江，并说明它为什么对中国的农业和运输如此重要。",
)
# one prompt length is needed where every tensor is compared; this many tokens show every op at work
TENSOR_TOKENS = 48


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    passed: bool
    finding: str


@click.command(cls=OneLineErrors, context_settings={"show_default": True})
@click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Checkpoint folder.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("precision_report"), help="Folder of the page.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="float32 shows faults that bfloat16's rounding would hide.",
)
@click.option("--device", default="cpu", help="cpu, cuda or npu.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON list of texts; by default three of our own.")
@click.option("--new_tokens", type=click.IntRange(min=1), default=16, help="Greedy tokens compared per prompt.")
@click.option("--graph/--no-graph", default=True, help="Also the tuned model's graphs against its eager mode.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    help="Also one process against so many tensor-parallel ones (CPU).",
)
@click.option("--force", is_flag=True, help="Overwrite an earlier page.")
def main(
    model_path: Path,
    output: Path,
    dtype: str,
    device: str,
    prompts: Optional[Path],
    new_tokens: int,
    graph: bool,
    ranks: int,
    force: bool,
) -> None:
    """Run stock and tuned on the same prompts and say whether they are the same.

    Exit status: 0 the same but for rounding, 1 different, 2 the check could not be made.
    """
    try:
        with user_errors():
            passed = run(model_path, output, dtype, device, prompts, new_tokens, graph, ranks, force)
    except click.ClickException as error:
        # 1 says that the models differ
        error.exit_code = 2
        raise
    sys.exit(0 if passed else 1)


def run(
    model_path: Path,
    output: Path,
    dtype: str,
    device: str,
    prompts: Path | None,
    new_tokens: int,
    graph: bool,
    ranks: int,
    force: bool,
) -> bool:
    """The whole check; returns the verdict.

    Raises:
        UserError: for anything that keeps the check from being made.
    """
    import precision_checks

    from npu_tuned_model import UserError, load_model
    from npu_tuned_model.device import resolve_device, resolve_dtype
    from precision import PrecisionError
    from precision.compare.report import check_output

    try:
        check_output(output, force=force)
    except PrecisionError as error:
        raise UserError(str(error)) from error
    if (output / "check_precision.html").exists() and not force:
        raise UserError(f"{output} holds check_precision.html already; pass --force to overwrite, or another --output")
    texts = read_prompts(prompts)
    place = resolve_device(device)
    if ranks > 1 and place.type != "cpu":
        raise UserError(f"--ranks {ranks} runs on the CPU only, not on {place}: pass --device cpu, or leave it out")
    tuned = load_model(model_path, device=place, dtype=dtype)
    stock = load_stock(model_path, resolve_dtype(dtype)).to(place)
    batch, mask = tokenize(model_path, texts, tuned.config.vocab_size)
    scratch = Path(tempfile.mkdtemp(prefix="check-precision-", dir=output))
    try:
        checks, lines, differences = run_checks(
            stock, tuned, batch.to(place), mask.to(place), new_tokens, scratch, graph=graph
        )
        if ranks > 1:
            ids = same_length(batch, mask)
            following = ids[:, -precision_checks.DECODE_STEPS :].contiguous()
            check = precision_checks.one_rank_against_many(tuned, model_path, ranks, ids, following, scratch)
            checks.append(check)
            lines.append(tensor_finding(check))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    passed = all(line.passed for line in lines)
    conditions = f"{dtype} on {place}, {len(texts)} prompts, {new_tokens} new tokens each"
    write_page(output, str(model_path), conditions, checks, lines, differences, passed)
    click.echo(
        "\n".join(f"{'same     ' if line.passed else 'DIFFERENT'}  {line.name}: {line.finding}" for line in lines)
    )
    click.echo(f"{'the same but for rounding' if passed else 'DIFFERENT'}; wrote {output / 'check_precision.html'}")
    return passed


def run_checks(
    stock: Any, tuned: Any, batch: Any, mask: Any, new_tokens: int, scratch: Path, *, graph: bool
) -> tuple[list[Any], list[Finding], list[Any]]:
    """The comparisons themselves, for two loaded models and prompts padded on the left."""
    import precision_checks

    ids = same_length(batch, mask)
    checks = [precision_checks.stock_against_tuned(stock, tuned, ids, scratch)]
    lines = [tensor_finding(checks[0])]
    # any text serves as long as both modes are fed the same
    following = ids[:, -precision_checks.DECODE_STEPS :].contiguous()
    if graph:
        checks.append(precision_checks.eager_against_graph(tuned, ids, following, scratch))
        lines.append(tensor_finding(checks[-1]))
        error, allowed = precision_checks.compiled_against_eager(tuned, ids, following)
        name = "compiled graphs' logits against eager"
        lines.append(Finding(name, error <= allowed, f"relative error {error:.2g}, allowed {allowed:.2g}"))
    differences, tokens = precision_checks.text_differences(stock, tuned, batch, mask, new_tokens)
    lines.append(text_finding(differences, tokens))
    return checks, lines, differences


def tensor_finding(check: Any) -> Finding:
    """One comparison in a line."""
    comparison = check.comparison
    if check.culprit is not None:
        first = comparison.first_divergence()
        text = f"first divergence in {check.culprit} (relative error {first.error:.2g}, allowed {first.allowed:.2g})"
        return Finding(check.name, False, text)
    if not comparison.matched:
        return Finding(check.name, False, "nothing could be compared")
    rows = [row for row in comparison.rows if row.error == row.error]
    worst = max(rows, key=lambda row: row.error)
    text = f"{comparison.matched} tensors, largest relative error {worst.error:.2g} (allowed {worst.allowed:.2g})"
    return Finding(check.name, check.passed, text)


def text_finding(differences: list[Any], tokens: int) -> Finding:
    """The texts in a line."""
    if not differences:
        return Finding("greedy text, stock against tuned", True, f"all {tokens} tokens are equal")
    first = min(differences, key=lambda entry: entry.token)
    text = (
        f"{len(differences)} prompts differ, prompt {first.row} from new token {first.token} on: stock's choice led by "
        f"{first.margin:.3g}, the logits there differ by up to {first.logit_error:.3g}"
    )
    # a wide margin is a fault; a narrow one only if the tensors say so
    return Finding("greedy text, stock against tuned", all(entry.is_rounding for entry in differences), text)


def same_length(batch: Any, mask: Any) -> Any:
    """The last tokens of every prompt, as many as the shortest has: (prompts, tokens) without padding."""
    tokens = min(int(mask.sum(dim=1).min()), TENSOR_TOKENS)
    return batch[:, -tokens:].contiguous()


def read_prompts(path: Path | None) -> list[str]:
    """The texts of a JSON list, or our own."""
    from npu_tuned_model import UserError

    if path is None:
        return list(PROMPTS)
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the prompts {path} can't be read as JSON ({error})") from error
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"the prompts {path} must be a JSON list of texts, none of them empty")
    return texts


def tokenize(model_path: Path, texts: list[str], vocabulary: int) -> tuple[Any, Any]:
    """(ids, mask) padded on the left; a checkpoint without a tokenizer gets the texts' bytes as tokens."""
    import torch
    from transformers import AutoTokenizer

    if any((model_path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        return encoded["input_ids"], encoded["attention_mask"]
    rows = [[byte % (vocabulary - 2) + 2 for byte in text.encode("utf-8")][:96] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def load_stock(model_path: Path, dtype: Any) -> Any:
    """transformers' own model with its attention in small operations, which can be looked at."""
    from transformers import Qwen2ForCausalLM

    from npu_tuned_model import CheckpointError

    try:
        model = Qwen2ForCausalLM.from_pretrained(model_path, torch_dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"stock transformers can't load {model_path} ({' '.join(str(error).split())})") from error
    return model.eval()


def write_page(
    output: Path,
    model: str,
    conditions: str,
    checks: list[Any],
    lines: list[Finding],
    differences: list[Any],
    passed: bool,
) -> None:
    """check_precision.html, and one page per comparison with every tensor."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from precision.compare.report import error_plot, write_report
    from precision.output import write_atomic

    shown = []
    for check in checks:
        folder = output / check.name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        write_report(check.comparison, folder, check.name)
        plot = Markup(error_plot(check.comparison))
        shown.append({"name": check.name, "plot": plot, "link": f"{folder.name}/compare_result.html"})
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = page.get_template("check_precision.html").render(
        model=model,
        conditions=conditions,
        checks=shown,
        lines=lines,
        differences=differences,
        passed=passed,
        verdict="yes, but for rounding" if passed else "no",
    )
    write_atomic(output / "check_precision.html", text)


if __name__ == "__main__":
    main()
