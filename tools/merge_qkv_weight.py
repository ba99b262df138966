"""Fuse a checkpoint's q, k, v and gate, up weights for N ranks: python tools/merge_qkv_weight.py --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors
from tools.conversion import conversion_options, run_as_script, run_conversion


@click.command(cls=OneLineErrors)
@conversion_options
@click.option(
    "--tp_size", type=click.IntRange(min=1), help="Number of ranks (cards) to lay the rows out for. Default: 1."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as stored.")
@click.option("--unmerge", is_flag=True, help="The reverse: make the plain checkpoint from a converted one.")
def main(
    model_path: Path,
    output_path: Path,
    tp_size: int | None,
    dtype: str | None,
    unmerge: bool,
    compare: bool,
    force: bool,
    max_shard_size: int,
) -> None:
    """Write a checkpoint that loads on --tp_size ranks without any work: q, k, v and gate, up are one tensor each.

    Works on the files, in little memory; the result has safetensors files, an index, and all that the tokenizer needs.
    """
    with user_errors():
        from npu_tuned_model.checkpoint_convert import Conversion

        if unmerge and tp_size is not None:
            raise click.UsageError("--unmerge takes no --tp_size: the converted checkpoint says what it was made for")
        if unmerge and dtype is not None:
            raise click.UsageError("--unmerge takes no --dtype: it gives the weights back as they are")
        conversion = Conversion(
            model_path,
            output_path,
            tp_size=tp_size or 1,
            unmerge=unmerge,
            dtype=dtype,
            max_shard_bytes=max_shard_size,
            force=force,
        )
        run_conversion(conversion, compare=compare, made="plain" if unmerge else f"for tp_size {conversion.tp_size}")


if __name__ == "__main__":
    run_as_script(main)
