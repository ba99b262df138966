"""One line per step for the console."""

from __future__ import annotations

import math

from precision.monitor.collector import Step
from precision.monitor.records import Record


def status_line(step: Step, rows: list[tuple[Record, list[float]]], alerts: int) -> str:
    """Step, loss, norm of all gradients, speed, alerts: what of these the step has."""
    parts = [f"step {step.number}"]
    losses = [figures[0] for record, figures in rows if record.kind == "loss"]
    losses += [scalar.value for scalar in step.scalars if scalar.kind == "loss"]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4g}")
    gradients = [figures[0] for record, figures in rows if record.kind == "grad_reduced"]
    if gradients:
        parts.append(f"gradient norm {math.sqrt(sum(norm * norm for norm in gradients)):.4g}")
    parts += [f"{scalar.value:.1f} tokens/s" for scalar in step.scalars if scalar.name == "tokens_per_second"]
    parts.append(f"{len(rows)} rows, {alerts} alerts")
    return "monitor: " + "  ".join(parts)
