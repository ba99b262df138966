"""What the user is told while a run goes on."""

from __future__ import annotations

import math
import sys

from precision.monitor.collector import Step
from precision.monitor.records import Record


class Console:
    """Notes on stderr.

    Attributes:
        notes: what went otherwise than the user may expect.
    """

    def __init__(self, quiet: bool) -> None:
        """
        Args:
            quiet: whether only what is asked for line by line is printed.
        """
        self._quiet = quiet
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a note, and print it."""
        self.notes.append(text)
        self.show([text])

    def show(self, lines: list[str]) -> None:
        """Print lines, unless they are to be kept quiet."""
        if not self._quiet:
            print("\n".join(f"monitor: {line}" for line in lines), file=sys.stderr)


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
