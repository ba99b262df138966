"""What came of running one call again."""

from __future__ import annotations

import math
from typing import NamedTuple

OK = "ok"
WRONG = "wrong kernel"
ILL_CONDITIONED = "ill-conditioned"
NOT_DETERMINISTIC = "not deterministic"
ROUNDING = "other rounding"
NOT_CHECKED = "not checked"


class Finding(NamedTuple):
    """One output of one call.

    Attributes:
        output_index: place of the output; -1 for a call that was not checked.
        error: relative distance of the two results; its limit beside it.
        condition: relative change of the result per relative change of the inputs, where it was estimated.
        verdict: one of the constants above.
        reason: in words, for anything but a plain ok.
    """

    output_index: int
    dtype: str
    shape: str
    error: float
    limit: float
    condition: float = math.nan
    verdict: str = OK
    reason: str = ""

    @property
    def flagged(self) -> bool:
        return self.verdict not in (OK, NOT_CHECKED)

    @property
    def excess(self) -> float:
        """The error in units of its limit: what suspects are ranked by."""
        if self.verdict == NOT_CHECKED or math.isnan(self.error):
            return 0.0
        return self.error / self.limit if self.limit > 0 else (math.inf if self.error > 0 else 0.0)


class Record(NamedTuple):
    """A finding and where it was made; `module` is empty outside modules."""

    rank: int
    pert_mode: str
    stage: str
    step: int
    api_name: str
    module: str
    finding: Finding


def not_checked(reason: str) -> Finding:
    """The finding of a call that was not run again."""
    return Finding(-1, "", "", math.nan, math.nan, verdict=NOT_CHECKED, reason=reason)
