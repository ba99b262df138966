"""A comparison on paper: CSV, and one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from precision.compare import verdict
from precision.compare.comparison import Comparison, Row
from precision.errors import PrecisionError
from precision.output import probe, write_atomic

FILES = ("compare_result.csv", "compare_result.html")
COLUMNS = (
    "Step",
    "Target Name",
    "Golden Name",
    "Dtype",
    "Shape",
    "Cosine",
    "MaxAbsErr",
    "MaxRelativeErr",
    "MeanRelativeErr",
    "EucDist",
    "One Thousandth Err Ratio",
    "Five Thousandths Err Ratio",
    "Relative Error",
    "Allowed",
    "Verdict",
    "Message",
    *(f"{side} {key}" for key in ("Max", "Min", "Mean", "Norm") for side in ("Target", "Golden")),
)


def check_output(folder: Path, *, force: bool) -> None:
    """Raise PrecisionError when the folder holds a report and force is off, or can't be written."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing and not force:
        raise PrecisionError(f"{folder} holds {existing[0]} already; pass --force to overwrite, or another --output")
    try:
        probe(folder)
    except OSError as error:
        raise PrecisionError(f"{folder} can't be written ({error.strerror}); pass another --output") from error


def write_report(comparison: Comparison, folder: Path, title: str) -> list[Path]:
    """Write both files; returns their paths."""
    contents = (as_csv(comparison), as_html(comparison, title))
    for name, text in zip(FILES, contents):
        write_atomic(folder / name, text)
    return [folder / name for name in FILES]


def as_csv(comparison: Comparison) -> str:
    """All rows."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(_cells(row) for row in comparison.rows)
    return text.getvalue()


def summary_lines(comparison: Comparison) -> list[str]:
    """The outcome in words."""
    counts = comparison.counts
    kinds = (verdict.SAME, verdict.CLOSE, verdict.DIFFERENT, verdict.UNMATCHED, verdict.UNKNOWN)
    lines = [", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "no tensors"]
    if not comparison.matched:
        lines.append(
            "nothing could be compared: no tensor has a counterpart; a mapping file can say which names belong together"
        )
    first = comparison.first_divergence()
    if first is not None:
        where = first.address or first.target
        lines.append(
            f"first divergence: {where}, {first.target} (relative error {first.error:.3g}, allowed {first.allowed:.3g})"
        )
    elif comparison.matched:
        worst = max(
            (row for row in comparison.rows if math.isfinite(row.error)), key=lambda row: row.error, default=None
        )
        if worst is not None:
            lines.append(f"largest relative error {worst.error:.3g} (allowed {worst.allowed:.3g}) at {worst.target}")
    return lines + comparison.notes


def as_html(comparison: Comparison, title: str) -> str:
    """The page: summary, first divergence, error along depth, every row with a search field."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = json.dumps([[_shown(cell) for cell in _cells(row)] for row in comparison.rows], ensure_ascii=False)
    return templates.get_template("compare.html").render(
        title=title,
        passed=comparison.passed,
        summary=summary_lines(comparison),
        columns=COLUMNS,
        # a script element ends at the first "</", wherever it stands
        rows=Markup(rows.replace("</", "<\\/")),
        plot=Markup(error_plot(comparison)),
    )


def error_plot(comparison: Comparison) -> str:
    """Relative error of every result, in the order of execution, as SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [row for row in comparison.rows if not row.is_input and not math.isnan(row.error)]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = {verdict.SAME: "#888888", verdict.CLOSE: "#2a78c5", verdict.DIFFERENT: "#c52a2a"}
    finite = [row.error for row in rows if 0 < row.error < math.inf]
    floor = min(finite, default=1e-9) / 3
    ceiling = max(finite, default=1.0) * 3
    for kind, colour in colours.items():
        points = [(n, min(max(row.error, floor), ceiling)) for n, row in enumerate(rows) if row.verdict == kind]
        if points:
            places, errors = zip(*points)
            axes.scatter(places, errors, s=6, color=colour, label=kind)
    axes.set_yscale("log")
    axes.set_xlabel("results in the order of execution")
    axes.set_ylabel("relative L2 error")
    if rows:
        axes.legend(loc="upper left")
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _cells(row: Row) -> list[Any]:
    errors = row.errors
    figures = (
        (
            errors.cosine,
            errors.max_abs,
            errors.max_relative,
            errors.mean_relative,
            errors.euclidean,
            errors.thousandth,
            errors.five_thousandths,
        )
        if errors
        else ("",) * 7
    )
    statistics = [side for key in ("Max", "Min", "Mean", "Norm") for side in row.statistics.get(key, ("", ""))]
    head = [row.step, row.target, row.golden, row.dtype, str(row.shape)]
    return [*head, *figures, row.error, row.allowed, row.verdict, row.message, *statistics]


def _shown(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)
