"""What stop() says of a check."""

from __future__ import annotations

from collections import Counter

from precision.free_benchmark import findings
from precision.free_benchmark.findings import Record


class Summary:
    """Counts of one run, over all its steps.

    Attributes:
        seen: API calls that could have been checked.
        checked, flagged, replaced: calls by what became of them ("replaced": handler fix).
        unmatched: entries of list and scope that no call matched.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.checked = 0
        self.replaced = 0
        self.flagged: Counter[str] = Counter()
        self.unchecked: dict[str, Counter[str]] = {}
        self.skipped: dict[str, Counter[str]] = {}
        self.unmatched: list[str] = []
        self.hooked = 0
        self.functions = 0
        self.coverage = ""
        self.learned = 0
        self.notes: list[str] = []

    def record(self, record: Record) -> None:
        finding, api = record.finding, record.api_name.rpartition(".")[0]
        if finding.verdict == findings.NOT_CHECKED:
            self.unchecked.setdefault(finding.reason, Counter())[api] += 1
        if finding.flagged:
            self.flagged[f"{finding.verdict} {api}"] += 1

    def skip(self, reason: str, name: str) -> None:
        try:
            self.skipped[reason][name] += 1
        except KeyError:
            self.skipped[reason] = Counter({name: 1})

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """The summary in words."""
        done = f"checked {self.checked} of {self.seen} calls"
        if self.replaced:
            done = f"replaced the results of {self.replaced} of {self.seen} calls"
        result = [f"{done}; {sum(self.flagged.values())} results flagged"]
        if self.flagged:
            result.append("flagged: " + _counted(self.flagged))
        for reason, apis in sorted(self.unchecked.items()):
            result.append(f"not checked {sum(apis.values())}: {reason} ({_counted(apis)})")
        for reason, apis in sorted(self.skipped.items()):
            result.append(f"skipped {sum(apis.values())}: {reason} ({_counted(apis)})")
        if self.unmatched:
            result.append(f"matched no call: {', '.join(self.unmatched)}")
        if self.learned:
            result.append(f"preheat raised the limit of {self.learned} results' APIs: there the CPU gives the same")
        if self.coverage:
            result.append(self.coverage)
        return result + self.notes

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _counted(names: Counter[str]) -> str:
    most = ", ".join(f"{name} {count}" for name, count in names.most_common(4))
    return most + (", ..." if len(names) > 4 else "")
