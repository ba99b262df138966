"""A report as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmark import report as text
from benchmark.plots import all_plots


def render_html(report: dict[str, Any]) -> str:
    """The page: conditions, tables, plots, and the whole report as JSON at its end."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    line, promise_kept = text.graph_line(report["execution"])
    page = templates.get_template("report.html").render(
        report=report,
        conditions=text.conditions(report),
        limits=text.limits(report),
        figures=[
            (label, [text.spread(variant["summary"].get(key), form) for variant in report["variants"].values()])
            for key, label, form in text.shown_rows(report["variants"])
        ],
        figures_title=text.figures_title(report["environment"]),
        graphs=line,
        promise_kept=promise_kept,
        comparison=text.comparison_lines(report["comparison"]) if report["comparison"] else [],
        profile_title=text.PROFILE_TITLE,
        ablation_title=text.ablation_title,
        ablation_columns=text.ABLATION_COLUMNS,
        ablation_cells=text.ablation_cells,
        plots=[(title, Markup(svg)) for title, svg in all_plots(report)],
        json_text=json.dumps(report, indent=1, ensure_ascii=False),
    )
    return page
