"""What the commands share: how the process is set up, and errors that are one line on stderr and a non-zero exit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

# Both are read when torch is first imported, and hold for every model that is measured.
# OpenMP threads that spin for long beside busy neighbours hold the others up.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Tensors on huge pages: reading the weights in a decode step misses the address cache less often.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class OneLineErrors(click.Command):
    """A command whose every error is one line on stderr."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        try:
            result: Any = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Aborted", err=True)
            sys.exit(130)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn the package's UserError into click's one-line error."""
    from npu_tuned_model.errors import UserError

    try:
        yield
    except UserError as error:
        raise click.ClickException(str(error)) from error
