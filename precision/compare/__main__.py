"""python -m precision.compare --golden A --target B [--output DIR]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional

import click

from precision.compare.comparison import compare_paths
from precision.compare.mapping import read_mapping
from precision.compare.report import check_output, summary_lines, write_report
from precision.errors import PrecisionError


@click.command(context_settings={"show_default": True})
@click.option("--golden", required=True, type=click.Path(path_type=Path), help="The dump to be held against.")
@click.option("--target", required=True, type=click.Path(path_type=Path), help="The dump in question.")
@click.option("--output", default=Path("compare_output"), type=click.Path(path_type=Path), help="Folder of the report.")
@click.option("--mapping", default=None, type=click.Path(path_type=Path), help="JSON or YAML rules where names differ.")
@click.option("--tolerance", default=None, type=float, help="Largest relative L2 error; by default by dtype.")
@click.option("--force", is_flag=True, help="Overwrite an earlier report.")
def main(
    golden: Path, target: Path, output: Path, mapping: Optional[Path], tolerance: Optional[float], force: bool
) -> None:
    """Compare two dumps, ours or msprobe's: CSV, one HTML page, and the exit status 0 same, 1 different, 2 an error."""
    try:
        check_output(output, force=force)
        rules = read_mapping(mapping) if mapping else []
        comparison = compare_paths(golden, target, rules, tolerance=tolerance)
        paths = write_report(comparison, output, f"{target} against {golden}")
    except PrecisionError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    click.echo("\n".join([*summary_lines(comparison), *(f"wrote {path}" for path in paths)]))
    sys.exit(0 if comparison.passed else 1)


if __name__ == "__main__":
    main()
