"""What stop() says of a check."""

from __future__ import annotations

from collections import Counter

from precision.free_benchmark import findings
from precision.free_benchmark.findings import Record
from precision.summary import CallSummary, counted, reason_lines


class Summary(CallSummary):
    """Counts of one run, over all its steps.

    Attributes:
        seen: API calls that could have been checked.
        checked, flagged, replaced: calls by what became of them ("replaced": handler fix).
        unchecked: calls that could not be judged, by reason and name.
        unmatched: entries of list and scope that no call matched.
        coverage: with rotation, how many steps it takes and how many are done.
        learned: APIs whose limit preheat raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.replaced = 0
        self.flagged: Counter[str] = Counter()
        self.unchecked: dict[str, Counter[str]] = {}
        self.unmatched: list[str] = []
        self.coverage = ""
        self.learned = 0

    def record(self, record: Record) -> None:
        finding, api = record.finding, record.api_name.rpartition(".")[0]
        if finding.verdict == findings.NOT_CHECKED:
            self.unchecked.setdefault(finding.reason, Counter())[api] += 1
        if finding.flagged:
            self.flagged[f"{finding.verdict} {api}"] += 1

    def lines(self) -> list[str]:
        """The summary in words."""
        done = f"checked {self.checked} of {self.seen} calls"
        if self.replaced:
            done = f"replaced the results of {self.replaced} of {self.seen} calls"
        result = [f"{done}; {sum(self.flagged.values())} results flagged"]
        if self.flagged:
            result.append("flagged: " + counted(self.flagged))
        result += reason_lines("not checked", self.unchecked)
        result += reason_lines("skipped", self.skipped)
        if self.unmatched:
            result.append(f"matched no call: {', '.join(self.unmatched)}")
        if self.learned:
            result.append(f"preheat raised the limit of {self.learned} results' APIs: there the CPU gives the same")
        if self.coverage:
            result.append(self.coverage)
        return result + self.notes
