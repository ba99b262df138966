"""The report: complete, with units in its keys, loading nothing from elsewhere, honest about broken promises."""

from __future__ import annotations

import copy
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from benchmark.html_report import render_html
from benchmark.report import graph_line, print_report, spread


class References(HTMLParser):
    """What a page would load or run, and which elements it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
            if loads and not (value or "").startswith("#"):
                self.loaded.append(f"{tag} {name}={value}")


def console_text(report: dict[str, Any], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    text: str = console.file.getvalue()
    return text


def test_json_round_trip(finished_report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(finished_report, allow_nan=False)) == finished_report


def test_every_measured_number_has_its_unit_in_its_name(finished_report: dict[str, Any]) -> None:
    unit = re.compile(
        r"_(ms|s|bytes|flop|tokens|gb_per_s|tflop_per_s|tokens_per_s|samples_per_s)$|share|_per_weights_read$|_per_s$"
    )
    for variant in finished_report["variants"].values():
        for key in variant["rounds"][0]:
            assert unit.search(key), key
    for section in ("memory", "work"):
        for key, value in finished_report[section].items():
            assert isinstance(value, str) or unit.search(key), key


def test_raw_values_of_all_rounds_are_kept(finished_report: dict[str, Any]) -> None:
    assert set(finished_report["variants"]) == {"stock eager", "stock sdpa", "tuned"}
    for variant in finished_report["variants"].values():
        assert len(variant["rounds"]) == 2
        assert all(len(figures["step_ms"]) == 4 for figures in variant["rounds"])
    assert len(finished_report["ceilings"]["rounds"]) == 2


def test_page_loads_nothing_and_holds_the_plots(finished_report: dict[str, Any]) -> None:
    page = render_html(finished_report)
    references = References()
    references.feed(page)
    assert references.loaded == []
    assert references.counts["svg"] == 4
    assert {"script", "link", "iframe", "img", "object", "base"}.isdisjoint(references.counts)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    assert "<!ENTITY" not in page
    assert page.count("<!DOCTYPE") == 1


def test_page_shows_text_as_text(finished_report: dict[str, Any]) -> None:
    report = copy.deepcopy(finished_report)
    report["sample_text"] = "<script>alert(1)</script>"
    report["notes"] = ["<b>note</b>"]
    page = render_html(report)
    assert "<script>" not in page
    assert "<b>note" not in page
    assert "&lt;script&gt;" in page


def test_console_shows_every_part(finished_report: dict[str, Any]) -> None:
    text = console_text(finished_report)
    for part in (
        "What is in force",
        "fixed_kv_cache",
        "prefill, ms",
        "time to first token",
        "share of memory bandwidth",
        "matmul peak",
        "KV cache",
        "times as fast as stock",
        "tuned against stock eager",
        "+ packed weights",
        "nothing compiled",
    ):
        assert part in text, part


def test_console_takes_brackets_in_text_literally(finished_report: dict[str, Any]) -> None:
    report = copy.deepcopy(finished_report)
    report["sample_text"] = "[/nonsense] [bold]x"
    report["model"]["path"] = "/tmp/[red]x"
    assert "[/nonsense] [bold]x" in console_text(report)
    assert "/tmp/[red]x" in console_text(report)


def test_a_single_variant_without_comparison(finished_report: dict[str, Any]) -> None:
    report = copy.deepcopy(finished_report)
    report["variants"] = {"tuned": report["variants"]["tuned"]}
    report["comparison"] = report["ablation"] = report["sample_text"] = None
    assert "times as fast" not in console_text(report)
    references = References()
    references.feed(render_html(report))
    assert references.counts["svg"] == 2


def test_one_new_token_has_no_decode_figures(finished_report: dict[str, Any]) -> None:
    report = copy.deepcopy(finished_report)
    for variant in report["variants"].values():
        for key in [key for key in variant["summary"] if key.startswith(("decode", "tpot"))]:
            del variant["summary"][key]
        for figures in variant["rounds"]:
            figures["step_ms"] = figures["step_ms"][:1]
    report["comparison"]["decode"] = None
    for row in report["ablation"]:
        row["eager"].update(decode_ms=None, decode_gain=None)
    assert "–" in console_text(report)
    assert "decode, ms per token" in render_html(report)


def test_each_step_has_its_ablation_table(finished_report: dict[str, Any]) -> None:
    report = copy.deepcopy(finished_report)
    gain = {"median": 1.25, "min": 0.75, "max": 2.0}
    report["ablation"][4].update(graph={**report["ablation"][4]["eager"], "decode_gain": gain})
    for text in (console_text(report), render_html(report)):
        assert "Ablation, prefill: each row adds" in text
        assert "Ablation, decode: each row adds" in text
        assert text.count("1.25 (0.75 .. 2.00)") == 1


def test_a_graph_compiled_late_is_shouted(finished_report: dict[str, Any]) -> None:
    execution = {
        "mode": "inductor",
        "asked": "dynamo",
        "graphs": {"prefill": 1, "decode": 2},
        "graphs_after_warm_up": 1,
        "cpu_decode": False,
        "first_call_s": {"prefill": 3.0, "decode": 4.0},
    }
    line, kept = graph_line(execution)
    assert not kept
    assert "1 compiled AFTER warm-up" in line
    assert graph_line({**execution, "graphs_after_warm_up": 0}) == (
        "inductor: prefill: 1 graph, 3.0 s, decode: 2 graphs, 4.0 s; none after warm-up",
        True,
    )
    report = {**finished_report, "execution": execution}
    assert '<p class="broken">' in render_html(report)
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    print_report(report, console)
    assert re.search(r"\x1b\[1;31mGraphs: ", console.file.getvalue())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"median": 2.0, "min": 1.0, "max": 3.0}, "2.0 (1.0 .. 3.0)"),
        ({"median": 2.0, "min": 2.0, "max": 2.0}, "2.0"),
        (None, "–"),
    ],
)
def test_spread(values: dict[str, float] | None, expected: str) -> None:
    assert spread(values, "{:.1f}") == expected
