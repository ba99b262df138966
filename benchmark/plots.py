"""The report's plots, as SVG to be put into a page."""

from __future__ import annotations

import io
import re
import statistics
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_COLOURS = {"tuned": "#0b7a75", "stock eager": "#b0b6bd", "stock sdpa": "#7d8791"}
_OTHER = "#4c6fa5"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def all_plots(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(title, svg) of every plot that the report has figures for."""
    variants = report["variants"]
    plots = [("Prefill and decode: median over rounds, line from minimum to maximum", _steps(variants))]
    if any(len(figures["rounds"][0]["step_ms"]) > 2 for figures in variants.values()):
        plots.append(("Every decode step: median over rounds, band from minimum to maximum", _per_token(variants)))
    if report["comparison"] and any(report["comparison"][step] for step in ("prefill", "decode")):
        plots.append(("Times as fast as the better stock variant, round by round", _ratios(report["comparison"])))
    if report["ablation"]:
        plots.append(("Ablation: each bar adds an optimisation to the one above", _ablation(report["ablation"])))
    return plots


def _steps(variants: dict[str, Any]) -> str:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "steps"}):
        figure = Figure(figsize=(9, 0.9 + 0.45 * len(variants)), layout="constrained")
        for axes, step in zip(figure.subplots(1, 2), ("prefill", "decode")):
            names = [name for name in variants if variants[name]["summary"].get(f"{step}_ms")]
            _bars(axes, names, [variants[name]["summary"][f"{step}_ms"] for name in names])
            axes.set_xlabel(f"{step}, ms" if step == "prefill" else "decode, ms per token")
        return _svg(figure)


def _bars(axes: Axes, names: list[str], values: list[dict[str, float]]) -> None:
    medians = [value["median"] for value in values]
    errors = [
        [value["median"] - value["min"] for value in values],
        [value["max"] - value["median"] for value in values],
    ]
    colours = [_COLOURS.get(name, _OTHER) for name in names]
    axes.barh(names, medians, xerr=errors, color=colours, ecolor="#333333", capsize=2, height=0.65)
    for row, value in enumerate(values):
        axes.annotate(
            f"{value['median']:.1f}", (value["max"], row), (6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_xlim(0, max((value["max"] for value in values), default=1.0) * 1.18)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e4e7ea")


def _per_token(variants: dict[str, Any]) -> str:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "tokens"}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, figures in variants.items():
            steps = [sorted(values) for values in zip(*(values["step_ms"][1:] for values in figures["rounds"]))]
            tokens = range(2, len(steps) + 2)
            colour = _COLOURS.get(name, _OTHER)
            axes.plot(tokens, [statistics.median(values) for values in steps], color=colour, label=name, linewidth=1.4)
            axes.fill_between(
                tokens, [v[0] for v in steps], [v[-1] for v in steps], color=colour, alpha=0.18, linewidth=0
            )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("generated token")
        axes.set_ylabel("ms")
        axes.grid(color="#e4e7ea")
        axes.legend(frameon=False, ncols=3)
        return _svg(figure)


def _ratios(comparison: dict[str, Any]) -> str:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "ratios"}):
        figure = Figure(figsize=(9, 2.6), layout="constrained")
        axes = figure.subplots()
        for step, colour in (("prefill", _OTHER), ("decode", _COLOURS["tuned"])):
            entry = comparison[step]
            if entry is not None:
                ratios = entry["ratio_per_round"]
                label = f"{step}, against {entry['against']}"
                axes.plot(range(1, len(ratios) + 1), ratios, "o-", color=colour, label=label)
        axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.grid(axis="y", color="#e4e7ea")
        axes.legend(frameon=False, ncols=2)
        return _svg(figure)


def _ablation(rows: list[dict[str, Any]]) -> str:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "ablation"}):
        figure = Figure(figsize=(9, 0.9 + 0.36 * len(rows)), layout="constrained")
        for column, (axes, step) in enumerate(zip(figure.subplots(1, 2, sharey=True), ("prefill", "decode"))):
            for mode, offset, colour in (("eager", -0.2, "#7d8791"), ("graph", 0.2, _COLOURS["tuned"])):
                shown = [
                    (index, row[mode][f"{step}_ms"]["median"])
                    for index, row in enumerate(rows)
                    if row[mode] is not None and row[mode][f"{step}_ms"] is not None
                ]
                if shown:
                    places = [index + offset for index, _ in shown]
                    axes.barh(places, [value for _, value in shown], height=0.36, color=colour, label=mode)
            axes.set_xlabel("prefill, ms" if step == "prefill" else "decode, ms per token")
            axes.grid(axis="x", color="#e4e7ea")
            if column == 0:
                axes.set_yticks(range(len(rows)), [row["optimisation"] for row in rows])
                axes.invert_yaxis()
                axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    """The <svg> element alone: no XML declaration, no document type (it names an external DTD), no metadata."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
