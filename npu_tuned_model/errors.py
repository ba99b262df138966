"""The errors a person running a command can put right."""

from __future__ import annotations


class UserError(ValueError):
    """One line for the person at the command line: the value, the limit, and what to do instead.

    Commands print the message without a traceback. A developer's mistake (a wrong argument to a function) is a plain
    ValueError instead.
    """


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or not one that the tuned model can run."""
