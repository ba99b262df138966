"""Benchmark Qwen2 on one card, or on this machine's CPU: python benchmark/npu/benchmark_qwen.py --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click

from benchmark.command import OneLineErrors, user_errors
from benchmark.run_options import run_options
from benchmark.setup_options import setup_options


@click.command(cls=OneLineErrors)
@click.option("--model_path", help="Checkpoint folder or Hub id. Without it: a sample of Qwen2-0.5B's shape.")
@run_options
@click.option("--ablation", is_flag=True, help="Also measure what each optimisation gains (several minutes).")
@click.option(
    "--compare",
    type=click.Choice(["stock", "none"]),
    help="Measure stock transformers in turn. Default: stock without --model_path, else none.",
)
@setup_options
def main(output_dir: Path | None, force: bool, compare: str | None, model_path: str | None, **options: Any) -> None:
    """Time prefill and decode of the tuned Qwen2, and compare with stock transformers.

    The classic workload is --batch_size=4 --input_max_len=1024 --max_new_tokens=1024.
    """
    from rich.console import Console

    from benchmark import report as console_report
    from benchmark import runner
    from benchmark.output import OutputFolder
    from benchmark.prepare import Settings, prepare

    console = Console()
    compare = compare or ("none" if model_path else "stock")
    with user_errors():
        settings = Settings(model_path=model_path, compare=compare == "stock", **options)
        prepared = prepare(settings, console)
        output = OutputFolder(output_dir, force=force)
        try:
            report = runner.run(prepared, console, output.trace)
            console_report.print_report(report, console)
            files = output.write(report)
        finally:
            output.discard()
    console.print(f"Written: {', '.join(str(file) for file in files)}", soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
