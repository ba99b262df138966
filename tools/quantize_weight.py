"""Write a checkpoint with int8 weights for N ranks: python tools/quantize_weight.py --help."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors
from tools.conversion import run_conversion, shard_size_option


@click.command(cls=OneLineErrors)
@click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Plain checkpoint folder to read.")
@click.option("--output_path", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
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
@click.option("--verify", "compare", is_flag=True, help="Then compare every tensor written with the source.")
@click.option("--force", is_flag=True, help="Replace what is at --output_path.")
@shard_size_option
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
    Works on the files, in little memory.
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
    # A polite kill cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
