"""Write a checkpoint with int8 weights for N ranks: python tools/quantize_weight.py --help."""

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
    "--tp_size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of ranks (cards) to lay the rows out for.",
)
@click.option(
    "--int8_embeddings/--no_int8_embeddings",
    default=True,
    show_default=True,
    help="Quantise the embedding table and the output layer, too.",
)
def main(
    model_path: Path,
    output_path: Path,
    tp_size: int,
    int8_embeddings: bool,
    compare: bool,
    force: bool,
    max_shard_size: int,
) -> None:
    """Write a checkpoint of half the size whose weights are int8, one scale for each output feature.

    It loads on --tp_size ranks without any work, to the same weights as load_model(..., weight_dtype="int8") gives.
    Reads a plain checkpoint; works on the files, in little memory.
    """
    with user_errors():
        from npu_tuned_model.checkpoint_convert import Conversion
        from npu_tuned_model.checkpoint_layout import Quantised

        conversion = Conversion(
            model_path,
            output_path,
            tp_size=tp_size,
            quantised=Quantised(True, int8_embeddings),
            max_shard_bytes=max_shard_size,
            force=force,
        )
        run_conversion(conversion, compare=compare, made=f"int8, for tp_size {tp_size}")


if __name__ == "__main__":
    run_as_script(main)
