"""Limits learned over the first steps: where the CPU confirms a flagged result, its API gets more room."""

from __future__ import annotations

from typing import Any

from precision.free_benchmark import findings
from precision.free_benchmark.config import FreeBenchmarkConfig
from precision.free_benchmark.examine import CPU, Examiner
from precision.free_benchmark.findings import Finding
from precision.free_benchmark.rerun import Call, CannotRerunError

# A learned limit is this much above the largest error that the CPU has confirmed.
MARGIN = 1.5


class Preheat:
    """Factors on the limits, per API, dtype and output.

    Attributes:
        raised: the factors above 1.
    """

    def __init__(self, config: FreeBenchmarkConfig, examiner: Examiner) -> None:
        self._steps = config.preheat_step if config.if_preheat else 0
        self._samples = config.max_sample
        self._examiner = examiner
        self._taken: dict[str, int] = {}
        self._step = 0
        self.raised: dict[tuple[str, str, int], float] = {}

    def next_step(self) -> None:
        self._step += 1

    def settle(self, call: Call, result: Any, found: list[Finding]) -> list[Finding]:
        """The findings under the learned limits; during the first steps flagged ones are held against the CPU."""
        if not self._steps or not any(finding.flagged for finding in found):
            return found
        found = [self._excused(call, finding) for finding in found]
        if self._step >= self._steps or not any(finding.flagged for finding in found):
            return found
        if self._taken.get(call.key, 0) >= self._samples:
            return found
        self._taken[call.key] = self._taken.get(call.key, 0) + 1
        try:
            confirmed = self._examiner.against_wider(call, result, device=CPU)
        except CannotRerunError:
            # without a second opinion the first one stands
            return found
        right = {finding.output_index for finding in confirmed if not finding.flagged}
        for finding in found:
            # a result that differs from itself has no limit to learn
            if (
                finding.flagged
                and finding.output_index in right
                and finding.limit > 0
                and finding.excess < float("inf")
            ):
                self.raised[self._key(call, finding)] = MARGIN * finding.excess
        return [self._excused(call, finding) for finding in found]

    def _excused(self, call: Call, finding: Finding) -> Finding:
        factor = self.raised.get(self._key(call, finding), 1.0)
        if not finding.flagged or finding.excess > factor:
            return finding
        reason = "limit raised in preheat: the CPU gives the same result"
        return finding._replace(limit=finding.limit * factor, verdict=findings.OK, reason=reason)

    @staticmethod
    def _key(call: Call, finding: Finding) -> tuple[str, str, int]:
        return call.key, finding.dtype, finding.output_index
