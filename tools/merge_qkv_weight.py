"""Fuse a checkpoint's q, k, v and gate, up weights for N ranks: python tools/merge_qkv_weight.py --help."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from benchmark.command import OneLineErrors, user_errors

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    match = re.fullmatch(r"(\d+) ?(|KB|MB|GB)", value.strip().upper())
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]


@click.command(cls=OneLineErrors)
@click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Checkpoint folder to read.")
@click.option("--output_path", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
@click.option(
    "--tp_size", type=click.IntRange(min=1), help="Number of ranks (cards) to lay the rows out for. Default: 1."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as stored.")
@click.option("--unmerge", is_flag=True, help="The reverse: make the plain checkpoint from a converted one.")
@click.option("--verify", "compare", is_flag=True, help="Then compare every tensor written with the source.")
@click.option("--force", is_flag=True, help="Replace what is at --output_path.")
@click.option("--max_shard_size", default="5GB", show_default=True, callback=_bytes, help="Size of a weight file.")
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
    from rich.console import Console

    from npu_tuned_model.checkpoint_convert import Conversion, verify
    from npu_tuned_model.device import resolve_dtype

    console = Console()
    with user_errors():
        if unmerge and tp_size is not None:
            raise click.UsageError("--unmerge takes no --tp_size: the converted checkpoint says what it was made for")
        if unmerge and dtype is not None:
            raise click.UsageError("--unmerge takes no --dtype: it gives the weights back as they are")
        conversion = Conversion(
            model_path,
            output_path,
            tp_size=tp_size or 1,
            unmerge=unmerge,
            dtype=None if dtype is None else resolve_dtype(dtype),
            max_shard_bytes=max_shard_size,
            force=force,
        )
        with _progress(console, "writing", conversion.total_bytes) as advance:
            conversion.write(advance)
        if compare:
            plain, converted = (output_path, model_path) if unmerge else (model_path, output_path)
            with _progress(console, "comparing", conversion.total_bytes) as advance:
                count = verify(plain, converted, advance)
            console.print(f"{count} tensors compared, all equal")
    made = "plain" if unmerge else f"for tp_size {conversion.tp_size}"
    console.print(
        f"Written: {output_path} ({made}, {conversion.total_bytes / 1e9:.2f} GB)", markup=False, soft_wrap=True
    )


def _progress(console: Any, what: str, total: int) -> Any:
    """A context manager that gives a function to call with the bytes that were done."""
    import contextlib

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    @contextlib.contextmanager
    def shown() -> Any:
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count: progress.advance(task, count)

    return shown()


if __name__ == "__main__":
    # A polite kill cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
