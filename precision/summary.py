"""What the summaries of all tasks have in common: what was left out, and remarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

# Names given for one reason; the rest are counted.
SHOWN = 4


class CallSummary(ABC):
    """Counts of one run, over all its steps.

    Attributes:
        seen: calls that the task could have taken in hand.
        skipped: calls left out, by reason and name.
        hooked, functions: modules with hooks, and registered functions.
        notes: remarks for the user, each once.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.skipped: dict[str, Counter[str]] = {}
        self.hooked = 0
        self.functions = 0
        self.notes: list[str] = []

    def skip(self, reason: str, name: str) -> None:
        """Count a call that is left out."""
        try:
            self.skipped[reason][name] += 1
        except KeyError:
            self.skipped[reason] = Counter({name: 1})

    def note(self, text: str) -> None:
        """Keep a remark, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    @abstractmethod
    def lines(self) -> list[str]:
        """The summary in words."""

    def __str__(self) -> str:
        return "\n".join(self.lines())


def reason_lines(what: str, reasons: dict[str, Counter[str]]) -> list[str]:
    """One line per reason: "skipped 7: outside list (Torch.cat 5, Tensor.sum 2)"."""
    return [f"{what} {sum(names.values())}: {reason} ({counted(names)})" for reason, names in sorted(reasons.items())]


def counted(names: Counter[str]) -> str:
    """The most frequent names with their counts."""
    most = ", ".join(f"{name} {count}" for name, count in names.most_common(SHOWN))
    return most + (", ..." if len(names) > SHOWN else "")
