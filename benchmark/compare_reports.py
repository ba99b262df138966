"""Two benchmark reports side by side: what differed between the runs, and how their figures relate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator

import click
from rich.console import Console
from rich.markup import escape

from benchmark.command import OneLineErrors, user_errors
from benchmark.report import ROWS, report_table, spread
from npu_tuned_model.errors import UserError

# What a run was made of; everything else in a report is what came out of it.
CONDITIONS = ("environment", "model", "workload", "execution", "in_force")
_OUTCOMES = ("execution.first_call_s", "execution.graphs")


def read_report(path: Path) -> dict[str, Any]:
    """The report of an earlier run.

    Raises:
        UserError: the file can't be read or holds no report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or not {*CONDITIONS, "variants"} <= report.keys():
        raise UserError(f"{path} is no report of this benchmark; give the report.json of a run")
    return report


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(condition, value in the first, value in the second) where the two runs were not alike."""
    left, right = (dict(_conditions(report)) for report in (first, second))
    names = [*left, *(name for name in right if name not in left)]
    pairs = [(name, left.get(name, "–"), right.get(name, "–")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _conditions(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for part in CONDITIONS[:-1]:
        for name, value in _leaves(part, report[part]):
            if not name.startswith(_OUTCOMES):
                yield name, value
    for row in report["in_force"]:
        yield f"in force: {row['name']}", "yes" if row["active"] else f"no, {row['why']}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(f"{name}.{key}", child)
    else:
        yield name, str(value)


def ratios(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """(variant, figure, first, second, second / first by medians) for the variants that both runs measured."""
    rows = []
    for variant, entry in first["variants"].items():
        if variant not in second["variants"]:
            continue
        for key, label, form in ROWS:
            left, right = entry["summary"].get(key), second["variants"][variant]["summary"].get(key)
            if left and right:
                ratio = f"{right['median'] / left['median']:.2f}" if left["median"] else "–"
                rows.append((variant, label, spread(left, form), spread(right, form), ratio))
    return rows


@click.command(cls=OneLineErrors)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
def main(first: Path, second: Path) -> None:
    """Compare two report.json files: what differed between the runs, and SECOND's figures over FIRST's."""
    with user_errors():
        reports = read_report(first), read_report(second)
        common = ratios(*reports)
        if not common:
            raise UserError("the two reports have no measured variant in common")
    console = Console()
    table = report_table("What differed between the runs", "", str(first), str(second))
    for row in differences(*reports):
        table.add_row(*map(escape, row))
    console.print(table)
    table = report_table("Median over rounds (range)", "variant", "figure", "first", "second", "second / first")
    for row in common:
        table.add_row(*map(escape, row))
    console.print(table)


if __name__ == "__main__":
    main()
