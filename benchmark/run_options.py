"""Command-line options of a run, shared by the commands for one card and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import click


def _positive() -> click.IntRange:
    return click.IntRange(min=1)


_OPTIONS = (
    click.option("--execute_mode", type=click.Choice(["dynamo", "eager"]), default="dynamo", show_default=True),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or npu."),
    click.option("--dtype", default="bfloat16", show_default=True, help="float32, bfloat16 or float16."),
    click.option("--batch_size", type=_positive(), default=1, show_default=True),
    click.option(
        "--input_max_len", type=_positive(), default=256, show_default=True, help="Tokens of the padded prompt."
    ),
    click.option(
        "--max_new_tokens", type=_positive(), default=32, show_default=True, help="Tokens to generate, exactly."
    ),
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        help="UTF-8 file with one prompt per line, or a JSON list of strings.",
    ),
    click.option("--lora", type=click.Path(path_type=Path), help="LoRA adapter (PEFT) to merge while loading."),
    click.option(
        "--weight_dtype",
        type=click.Choice(["int8"]),
        help="Quantise the linear layers' weights while loading. Default: as the checkpoint has them.",
    ),
    click.option(
        "--int8_embeddings/--no_int8_embeddings",
        default=True,
        show_default=True,
        help="With --weight_dtype: the embedding table and the output layer, too.",
    ),
    click.option("--rounds", type=_positive(), default=3, show_default=True),
    click.option(
        "--deterministic",
        is_flag=True,
        help="The same tokens from run to run and whatever the batch; what that costs is in the figures.",
    ),
    click.option(
        "--profile", is_flag=True, help="Also trace one generation: profile.json and the ten heaviest operators."
    ),
    click.option("--check_finite", is_flag=True, help="First look for NaN and Inf in every layer's result."),
    click.option(
        "--output_dir",
        type=click.Path(path_type=Path),
        help="Folder for report.json and report.html. Default: benchmark_reports/<date>-<time>.",
    ),
    click.option("--force", is_flag=True, help="Overwrite an earlier report in --output_dir."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
