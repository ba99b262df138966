"""What the commands that convert checkpoints share: options, the progress bar, what is said at the end."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from npu_tuned_model.checkpoint_convert import Conversion

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    match = re.fullmatch(r"(\d+) ?(|KB|MB|GB)", value.strip().upper())
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]


_OPTIONS = (
    click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Checkpoint folder to read."),
    click.option(
        "--output_path", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist."
    ),
    click.option("--verify", "compare", is_flag=True, help="Then compare every tensor written with the source."),
    click.option("--force", is_flag=True, help="Replace what is at --output_path."),
    click.option("--max_shard_size", default="5GB", show_default=True, callback=_bytes, help="Size of a weight file."),
)


def conversion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; --verify comes as `compare`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_as_script(command: Callable[[], Any]) -> None:
    """Run it so that a polite kill cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command()


def run_conversion(conversion: Conversion, *, compare: bool, made: str) -> None:
    """Write the checkpoint, compare it with its source where asked, and say what was made.

    Raises:
        UserError: when it can't be written.
        CheckpointError: when the comparison finds a difference.
    """
    from rich.console import Console

    from npu_tuned_model.checkpoint_convert import verify

    console = Console()
    with _progress(console, "writing", conversion.total_bytes) as advance:
        conversion.write(advance)
    if compare:
        source, output = conversion.source, conversion.output
        plain, converted = (output, source) if conversion.unmerge else (source, output)
        with _progress(console, "comparing", conversion.total_bytes) as advance:
            count = verify(plain, converted, advance)
        console.print(f"{count} tensors compared, all equal")
    size = conversion.total_bytes / 1e9
    console.print(f"Written: {conversion.output} ({made}, {size:.2f} GB)", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _progress(console: Any, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of bytes that were done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
