"""What stop() says of a dump: nothing that was left out goes unmentioned."""

from __future__ import annotations

from collections import Counter
from typing import Any

from precision.summary import CallSummary, reason_lines


class Summary(CallSummary):
    """Counts of one run, over all its steps.

    Attributes:
        seen: API and module calls that could have been recorded.
        recorded: records by family.
        modules: paths of the modules that ran.
        not_finite: tensors holding NaN or infinity.
        other_threads: module calls in threads other than the one that called start(), whose APIs can't be seen.
        empty: whether a step ended without a record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: Counter[str] = Counter()
        self.modules: set[str] = set()
        self.not_finite = 0
        self.other_threads = 0
        self.empty = False
        self._files: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._failure: str | None = None
        self._failed = 0

    def record(self, name: str) -> None:
        self.recorded[f"{name.partition('.')[0]} {'backward' if '.forward' not in name else 'forward'}"] += 1

    def files(self, files: Any) -> None:
        self._files = (files.written, files.linked, files.copied, files.bytes_written)
        self._failure, self._failed = files.failure, len(files.failed)

    def lines(self) -> list[str]:
        """The summary in words."""
        result = [f"hooked {self.hooked} modules ({len(self.modules)} ran) and {self.functions} registered functions"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.recorded.items())) or "nothing"
        result.append(f"recorded {kinds} of {self.seen} calls")
        result += reason_lines("skipped", self.skipped)
        written, linked, copied, size = self._files
        if written or linked or copied:
            result.append(f"wrote {written} tensor files ({size / 1e6:.1f} MB), {linked} links, {copied} copies")
        if self._failure:
            result.append(f"{self._failed} tensors are missing: {self._failure}")
        if self.not_finite:
            result.append(f"{self.not_finite} tensors hold NaN or infinity")
        if self.other_threads:
            result.append(f"{self.other_threads} module calls ran in other threads, whose APIs can't be seen")
        return result + self.notes
