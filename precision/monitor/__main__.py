"""python -m precision.monitor OUTPUT_DIR: one page of a run's ranks, and the first alert."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from precision.errors import PrecisionError
from precision.monitor.page import find_runs, read_alerts, write_page


@click.command()
@click.argument("output_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The page; OUTPUT_DIR/monitor.html.")
@click.option("--force", is_flag=True, help="Overwrite an earlier page.")
def main(output_dir: Path, output: Path | None, force: bool) -> None:
    """Make one page of the figures in OUTPUT_DIR, over all ranks, and name the first alert."""
    path = output or output_dir / "monitor.html"
    try:
        if path.exists() and not force:
            raise PrecisionError(f"{path} exists already; pass --force to overwrite it, or another --output")
        runs = find_runs(output_dir)
        alerts = read_alerts(runs)
        print(f"first of {len(alerts)} alerts: {alerts[0]}" if alerts else "no alerts")
        print(write_page(runs, path))
    except (PrecisionError, OSError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
