"""A run on one page that loads nothing from elsewhere: heat map of rows and steps, trend lines, alerts of all ranks."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any, Iterator

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from precision.errors import PrecisionError
from precision.monitor.alerts import Alert, first
from precision.monitor.records import kind_order
from precision.output import write_atomic

# Columns of a heat map; of longer runs steps are left out evenly, those with alerts never.
MAX_STEPS = 400
_FILE = re.compile(r"(?P<kind>.+)_(?P<first>\d+)-(?P<last>\d+)\.csv")
_RANK = re.compile(r"-rank(\d+)-")
_FIXED = ("vpp_stage", "name", "step", "micro_step", "shape", "dtype")


def find_runs(folder: Path) -> list[Path]:
    """The folders of ranks in an output folder, or the folder itself when it is one.

    Raises:
        PrecisionError: when there are none.
    """
    runs = [path for path in [folder, *sorted(folder.glob("*-rank*"))] if path.is_dir() and any(_files(path))]
    if not runs:
        raise PrecisionError(f"{folder} holds no figures of a monitor; pass its output_dir or a run's folder")
    return runs


def read_alerts(runs: list[Path]) -> list[Alert]:
    """The alerts of all ranks, in the order in which they happened."""
    alerts = []
    for run in runs:
        path = run / "alerts.csv"
        if path.exists():
            with open(path, encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    whole: dict[str, Any] = {key: int(row[key]) for key in ("step", "rank", "place", "micro_step")}
                    alerts.append(Alert(**{**row, **whole}))
    return sorted(alerts, key=lambda alert: alert.order)


def write_page(runs: list[Path], path: Path) -> Path:
    """Make the page of one run's ranks; returns its path."""
    alerts = read_alerts(runs)
    kept = {alert.step for alert in alerts[:MAX_STEPS]}
    tables = [table for run in runs for table in _tables(run, kept)]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # a script element ends at the first "</", wherever it stands
    data = Markup(json.dumps(tables, ensure_ascii=False, allow_nan=False).replace("</", "<\\/"))
    names = ", ".join(run.name for run in runs)
    text = templates.get_template("monitor.html").render(
        title=f"Monitor: {names}", first=first(alerts), alerts=alerts, tables=data
    )
    write_atomic(path, text)
    return path


def _files(run: Path) -> Iterator[tuple[str, int, Path]]:
    for path in run.glob("*.csv"):
        match = _FILE.fullmatch(path.name)
        if match:
            yield match["kind"], int(match["first"]), path


def _tables(run: Path, kept: set[int]) -> list[dict[str, Any]]:
    by_kind: dict[str, list[tuple[int, Path]]] = {}
    for kind, number, path in _files(run):
        by_kind.setdefault(kind, []).append((number, path))
    match = _RANK.search(run.name)
    rank = match[1] if match else "0"
    return [
        _table(f"rank {rank} {kind}", [path for _, path in sorted(by_kind[kind])], kept)
        for kind in sorted(by_kind, key=kind_order)
    ]


def _table(title: str, paths: list[Path], kept: set[int]) -> dict[str, Any]:
    """{"title", "ops", "names", "steps", "values": {op: rows of values by step}}; of forward passes the last."""
    values: dict[str, dict[tuple[str, int], float]] = {}
    names: dict[str, None] = {}
    steps: set[int] = set()
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                name, step = row["name"] or "(model)", int(row["step"])
                if row["vpp_stage"] != "0":
                    name = f"{row['vpp_stage']}:{name}"
                names[name] = None
                steps.add(step)
                for op in row:
                    if op not in _FIXED:
                        values.setdefault(op, {})[(name, step)] = float(row[op])
    shown = _thinned(sorted(steps), kept)
    return {
        "title": title,
        "ops": list(values),
        "names": list(names),
        "steps": shown,
        "values": {op: [[_json_value(found.get((name, step))) for step in shown] for name in names]
                   for op, found in values.items()},
    }  # fmt: skip


def _thinned(steps: list[int], kept: set[int]) -> list[int]:
    stride = -(-len(steps) // MAX_STEPS)
    return [step for place, step in enumerate(steps) if place % stride == 0 or step in kept]


def _json_value(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "inf"
