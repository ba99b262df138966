"""The errors a person using the precision tools can put right."""

from __future__ import annotations


class PrecisionError(ValueError):
    """One line for the user: the value, the limit, and what to do instead."""
