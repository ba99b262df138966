"""What a step's check found, on paper: the flagged calls in msprobe's columns, every call, and a page of suspects."""

from __future__ import annotations

import csv
import functools
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from precision.errors import PrecisionError
from precision.free_benchmark import findings
from precision.free_benchmark.findings import Record
from precision.output import probe, write_atomic

FLAGGED, CALLS, PAGE = "free_benchmark.csv", "free_benchmark_calls.csv", "free_benchmark.html"
COLUMNS = ("rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")
MORE_COLUMNS = ("limit", "condition", "verdict", "module", "reason")
# Rows of the page: all that are flagged, and those that come closest.
SHOWN = 200


def prepare(folder: Path) -> None:
    """Make a step's folder and see that it can be written.

    Raises:
        PrecisionError: when it can't, or holds a report already.
    """
    if (folder / FLAGGED).exists():
        raise PrecisionError(f"{folder} holds a report already; choose another dump_path, or remove it first")
    try:
        probe(folder)
    except OSError as error:
        reason = error.strerror or error
        raise PrecisionError(f"dump_path can't be written: {folder} ({reason}); choose another dump_path") from error


def write_step(folder: Path, records: list[Record], title: str, summary: list[str]) -> None:
    """Write a step's three files, complete or not at all.

    Raises:
        PrecisionError: when they can't be written.
    """
    flagged = [record for record in records if record.finding.flagged]
    try:
        write_atomic(folder / FLAGGED, _csv(COLUMNS, [_cells(record) for record in flagged]))
        write_atomic(folder / CALLS, _csv(COLUMNS + MORE_COLUMNS, [_all_cells(record) for record in records]))
        write_atomic(folder / PAGE, as_html(records, title, summary))
    except OSError as error:
        raise PrecisionError(f"the report can't be written to {folder} ({error.strerror or error})") from error


def as_html(records: list[Record], title: str, summary: list[str]) -> str:
    """One self-contained page: the suspects ranked, the APIs, and what was not checked and why."""
    ranked = sorted(records, key=lambda record: (not record.finding.flagged, -record.finding.excess))
    shown = [record for record in ranked if record.finding.verdict != findings.NOT_CHECKED]
    flagged = sum(record.finding.flagged for record in records)
    reasons: Counter[tuple[str, str]] = Counter()
    for record in records:
        if record.finding.verdict == findings.NOT_CHECKED:
            reasons[_api(record), record.finding.reason] += 1
    return _template().render(
        title=title,
        summary=summary,
        flagged=flagged,
        rows=[_row(record) for record in shown[: max(SHOWN, flagged)]],
        hidden=len(shown) - max(SHOWN, flagged),
        apis=_apis(records),
        unchecked=[(api, count, reason) for (api, reason), count in reasons.most_common()],
    )


def _apis(records: list[Record]) -> list[dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_api(record), []).append(record)
    rows = []
    for api, group in groups.items():
        checked = [record.finding for record in group if record.finding.verdict != findings.NOT_CHECKED]
        conditions = [finding.condition for finding in checked if not math.isnan(finding.condition)]
        rows.append(
            {
                "api": api,
                "checked": len(checked),
                "flagged": sum(finding.flagged for finding in checked),
                "unchecked": len(group) - len(checked),
                "worst": _shown(max((finding.error for finding in checked), default=math.nan)),
                "excess": max((finding.excess for finding in checked), default=0.0),
                "condition": _shown(max(conditions, default=math.nan)),
            }
        )
    return sorted(rows, key=lambda row: (-row["flagged"], -row["excess"]))


def _row(record: Record) -> dict[str, Any]:
    finding = record.finding
    return {
        "flagged": finding.flagged,
        "cells": [
            f"{record.api_name}" + (f" [{finding.output_index}]" if finding.output_index else ""),
            record.module,
            finding.verdict,
            _shown(finding.error),
            _shown(finding.limit),
            _shown(finding.excess),
            _shown(finding.condition),
            finding.dtype.replace("torch.", ""),
            finding.shape.replace("torch.Size", ""),
            finding.reason,
        ],
    }


def _cells(record: Record) -> list[Any]:
    finding = record.finding
    where = [record.rank, record.pert_mode, record.stage, record.step, record.api_name]
    return [*where, finding.error, finding.dtype, finding.shape, finding.output_index]


def _all_cells(record: Record) -> list[Any]:
    finding = record.finding
    return [*_cells(record), finding.limit, finding.condition, finding.verdict, record.module, finding.reason]


def _api(record: Record) -> str:
    return record.api_name.rpartition(".")[0]


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _csv(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


@functools.lru_cache(maxsize=1)
def _template() -> Template:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("free_benchmark.html")
