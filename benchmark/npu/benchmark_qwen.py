"""Benchmark Qwen2 on one card, or on this machine's CPU: python benchmark/npu/benchmark_qwen.py --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click

from benchmark.command import OneLineErrors, user_errors
from benchmark.setup_options import setup_options


def _positive() -> click.IntRange:
    return click.IntRange(min=1)


@click.command(cls=OneLineErrors)
@click.option("--model_path", help="Checkpoint folder or Hub id. Without it: a sample of Qwen2-0.5B's shape.")
@click.option("--execute_mode", type=click.Choice(["dynamo", "eager"]), default="dynamo", show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or npu.")
@click.option("--dtype", default="bfloat16", show_default=True, help="float32, bfloat16 or float16.")
@click.option("--batch_size", type=_positive(), default=1, show_default=True)
@click.option("--input_max_len", type=_positive(), default=256, show_default=True, help="Tokens of the padded prompt.")
@click.option("--max_new_tokens", type=_positive(), default=32, show_default=True, help="Tokens to generate, exactly.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="UTF-8 file with one prompt per line, or a JSON list of strings."
)
@click.option("--ablation", is_flag=True, help="Also measure what each optimisation gains (several minutes).")
@click.option(
    "--compare",
    type=click.Choice(["stock", "none"]),
    help="Measure stock transformers in turn. Default: stock without --model_path, else none.",
)
@click.option("--rounds", type=_positive(), default=3, show_default=True)
@click.option("--check_finite", is_flag=True, help="First look for NaN and Inf in every layer's result.")
@setup_options
@click.option(
    "--output_dir",
    type=click.Path(path_type=Path),
    help="Folder for report.json and report.html. Default: benchmark_reports/<date>-<time>.",
)
@click.option("--force", is_flag=True, help="Overwrite an earlier report in --output_dir.")
def main(output_dir: Path | None, force: bool, compare: str | None, model_path: str | None, **options: Any) -> None:
    """Time prefill and decode of the tuned Qwen2, and compare with stock transformers.

    The classic workload is --batch_size=4 --input_max_len=1024 --max_new_tokens=1024.
    """
    from rich.console import Console

    from benchmark import report as console_report
    from benchmark import runner
    from benchmark.output import OutputFolder

    console = Console()
    compare = compare or ("none" if model_path else "stock")
    with user_errors():
        settings = runner.Settings(model_path=model_path, compare=compare == "stock", **options)
        prepared = runner.prepare(settings, console)
        output = OutputFolder(output_dir, force=force)
        try:
            report = runner.run(prepared, console)
            console_report.print_report(report, console)
            files = output.write(report)
        finally:
            output.discard()
    console.print(f"Written: {', '.join(str(file) for file in files)}", soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
