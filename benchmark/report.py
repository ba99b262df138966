"""A report on the console: tables of what was in force, how fast it was, and how it compares.

``python -m benchmark.report A.json B.json`` compares two earlier reports (compare_reports.py).
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROWS: tuple[tuple[str, str, str], ...] = (
    ("prefill_ms", "prefill, ms", "{:.1f}"),
    ("decode_ms", "decode, ms per token", "{:.2f}"),
    ("decode_host_ms", "  of which the host issues it, ms", "{:.2f}"),
    ("between_steps_ms", "host between decode steps, ms", "{:.2f}"),
    ("ttft_ms", "time to first token, ms", "{:.1f}"),
    ("tpot_ms", "time per output token, ms", "{:.2f}"),
    ("tokens_per_s", "tokens/s, prefill included", "{:.1f}"),
    ("decode_tokens_per_s", "tokens/s, decode only", "{:.1f}"),
    ("samples_per_s", "samples/s", "{:.3f}"),
    ("prefill_share_of_matmul_peak", "prefill, share of matmul peak", "{:.0%}"),
    ("decode_share_of_bandwidth", "decode, share of memory bandwidth", "{:.0%}"),
    ("decode_per_weights_read", "decode, in reads of the weights", "{:.2f}"),
)

ABLATION_COLUMNS = ("optimisation", "eager, ms", "times as fast", "graph, ms", "times as fast")
PROFILE_TITLE = "Heaviest operators of one generation, by time of their own"


def gigabytes(count: float) -> str:
    """Decimal gigabytes, megabytes below one tenth of one."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def spread(values: dict[str, float] | None, form: str) -> str:
    """ "median (min .. max)", or a dash."""
    if values is None:
        return "–"
    middle, low, high = (form.format(values[key]) for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low} .. {high})"


def agreement_line(name: str, entry: dict[str, Any]) -> str:
    """One pair of models' token agreement in words."""
    line = f"{name}: {entry['equal_share']:.1%} of the tokens equal"
    parts = [
        f"row {row} at token {index} (logit gap {gap:.3f})"
        for row, (index, gap) in enumerate(zip(entry["first_difference_per_row"], entry["logit_gap_per_row"]))
        if index is not None
    ]
    return f"{line}; first differences: {', '.join(parts)}" if parts else line


def graph_line(execution: dict[str, Any]) -> tuple[str, bool]:
    """What was compiled, and whether the promise held that nothing is compiled after warm-up."""
    if execution["mode"] == "eager":
        return "eager: nothing compiled", True
    compiled = ", ".join(
        f"{step}: {count} graph{'s' if count != 1 else ''}, {execution['first_call_s'].get(step, 0.0):.1f} s"
        for step, count in execution["graphs"].items()
    )
    if execution["cpu_decode"]:
        compiled += ", decode: one C++ call per token, no graph"
    late = execution["graphs_after_warm_up"]
    if late:
        return f"{execution['mode']}: {compiled}; {late} compiled AFTER warm-up, so the times include compiling", False
    return f"{execution['mode']}: {compiled}; none after warm-up", True


def conditions(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What the figures were taken on and with, as (name, value)."""
    env, work, model = report["environment"], report["workload"], report["model"]
    tokens = work["prompt_tokens_per_row"]
    real = f"{min(tokens)}" if min(tokens) == max(tokens) else f"{min(tokens)} to {max(tokens)}"
    cores = f"{env['cpu_cores']} cores, {env['torch_threads']} threads"
    return [
        ("model", f"{model['path'] or 'sample checkpoint (random weights)'}: {model['layers']} layers, hidden "
         f"{model['hidden_size']}, {model['heads']}/{model['kv_heads']} heads, {model['dtype']}, weights "
         f"{model.get('weight_dtype', model['dtype'])}"),
        ("workload", f"batch {work['batch_size']}, prompt {work['input_max_len_tokens']} tokens ({real} without "
         f"padding), {work['max_new_tokens']} new tokens, {work['rounds']} rounds"),
        ("prompts", f"{work['prompts']}{', in the chat template' if work['chat_template'] else ''}"),
        ("decoding", work["decoding"]),
        ("device", f"{env['device']}; {env['cpu']}, {cores}; {env['system']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in env["versions"].items())),
        ("execution", f"{report['execution']['mode']} (asked for: {report['execution']['asked']})"),
    ]  # fmt: skip


def limits(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The measured ceilings and the memory, as (name, value)."""
    ceiling, memory = report["ceilings"]["summary"], report["memory"]
    rows = [
        ("memory bandwidth (reading)", f"{spread(ceiling['bandwidth_gb_per_s'], '{:.1f}')} GB/s"),
        ("one read of the weights", f"{spread(ceiling['weights_read_ms'], '{:.2f}')} ms"),
        ("matmul peak", f"{spread(ceiling['matmul_tflop_per_s'], '{:.3f}')} TFLOP/s "
         f"({report['ceilings']['rounds'][-1]['matmul_shape']})"),
        ("weights", gigabytes(memory["weights_bytes"])),
        ("KV cache", gigabytes(memory["kv_cache_bytes"])),
        ("peak while loading", f"{gigabytes(memory['load_peak_bytes'])} ({gigabytes(memory['before_load_bytes'])} "
         f"before; {memory['measured']})"),
        ("peak with the tuned model", f"{gigabytes(memory['tuned_peak_bytes'])} (warm-up, compiling included)"),
    ]  # fmt: skip
    if report["tensor_parallel"]:
        rows += _parallel_rows(report["tensor_parallel"])
    if report["comparison"]:
        rows.append(("peak with stock beside it", gigabytes(memory["all_models_peak_bytes"])))
    return rows


def _parallel_rows(parallel: dict[str, Any]) -> list[tuple[str, str]]:
    """What the ranks have and spend besides their own work."""
    peaks = parallel["peak_bytes_per_rank"]
    rows = [
        ("ranks", f"{parallel['ranks']}, {parallel['all_reduce']}"),
        ("peak per rank", ", ".join(gigabytes(peak) for peak in peaks)),
    ]
    for step in ("prefill", "decode"):
        entry = parallel[step]
        rows.append(
            (f"all-reduce, {step}", f"{spread(entry['all_reduce_ms'], '{:.3f}')} ms for {gigabytes(entry['bytes'])}, "
             f"{entry['count']} times: {entry['share']:.0%} of the step, measured alone")
        )  # fmt: skip
    for step, value in (parallel["linearity"] or {}).items():
        rows.append((f"linearity, {step}", f"{value:.0%} of {parallel['ranks']} times one rank's tokens/s"))
    return rows


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print all of it."""
    console.print(_pairs("Conditions", conditions(report)))
    console.print(_in_force(report["in_force"]))
    console.print(_figures(report))
    console.print(_pairs("Measured limits and memory", limits(report)))
    line, kept = graph_line(report["execution"])
    console.print(f"Graphs: {line}", style="" if kept else "bold red", markup=False, highlight=False)
    if report["comparison"]:
        _print_comparison(report["comparison"], console)
    if report["ablation"]:
        for step in ("prefill", "decode"):
            console.print(_ablation(report["ablation"], step))
    if report["profile"]:
        console.print(_profile(report["profile"]))
    if report["sample_text"] is not None:
        console.print("Start of row 0's text:", report["sample_text"][:300], markup=False, highlight=False)
    for note in report["notes"]:
        console.print(f"Note: {note}", style="yellow", markup=False, highlight=False)


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """The speed-up of each step and the token agreement of each pair, in words."""
    lines = []
    for step in ("prefill", "decode"):
        entry = comparison[step]
        if entry is not None:
            lines.append(
                f"{step}: {spread(entry['ratio'], '{:.2f}')} times as fast as {entry['against']}, the better stock"
            )
    lines += [agreement_line(name, entry) for name, entry in comparison["tokens"].items()]
    return lines


def _print_comparison(comparison: dict[str, Any], console: Console) -> None:
    for line in comparison_lines(comparison):
        speed = line.startswith(("prefill", "decode"))
        console.print(line, style="bold" if speed else "", markup=False, highlight=False)


def report_table(title: str, *columns: str) -> Table:
    """An empty table in the report's style."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    table = report_table(title, "", "")
    table.show_header = False
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _in_force(rows: list[dict[str, Any]]) -> Table:
    table = report_table("What is in force", "optimisation", "asked for", "active", "how, or why not")
    for row in rows:
        active = "[green]yes[/green]" if row["active"] else "[yellow]no[/yellow]"
        table.add_row(row["name"], "yes" if row["asked"] else "no", active, escape(row["why"]))
    return table


def figures_title(environment: dict[str, Any]) -> str:
    """What the table of figures is, and what it isn't."""
    title = "Median over rounds (range)"
    return f"{title}; simulated, no performance figures" if environment["simulated"] else title


def shown_rows(variants: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Those of ROWS that any variant has."""
    return [row for row in ROWS if any(row[0] in variant["summary"] for variant in variants.values())]


def _figures(report: dict[str, Any]) -> Table:
    variants = report["variants"]
    table = report_table(figures_title(report["environment"]), "", *variants)
    for key, label, form in shown_rows(variants):
        values = [spread(variant["summary"].get(key), form) for variant in variants.values()]
        table.add_row(label, *values)
    return table


def _profile(operators: list[dict[str, Any]]) -> Table:
    table = report_table(PROFILE_TITLE, "operator", "calls", "ms", "share")
    for entry in operators:
        table.add_row(escape(entry["operator"]), str(entry["calls"]), f"{entry['ms']:.2f}", f"{entry['share']:.1%}")
    return table


def _ablation(rows: list[dict[str, Any]], step: str) -> Table:
    table = report_table(ablation_title(step), *ABLATION_COLUMNS)
    for row in rows:
        table.add_row(row["optimisation"], *ablation_cells(row, step))
    return table


def ablation_title(step: str) -> str:
    """What the table of one step, "prefill" or "decode", shows."""
    return f"Ablation, {step}: each row adds to the one above, and is measured in turn with it"


def ablation_cells(row: dict[str, Any], step: str) -> list[str]:
    """The row's cells behind its name: milliseconds and gain in eager mode, the same in graph mode."""
    form = "{:.1f}" if step == "prefill" else "{:.2f}"
    cells = []
    for mode in ("eager", "graph"):
        figures = row[mode] or {}
        cells += [spread(figures.get(f"{step}_ms"), form), spread(figures.get(f"{step}_gain"), "{:.2f}")]
    return cells


if __name__ == "__main__":
    from benchmark.compare_reports import main

    main()
