"""A time budget: of the calls that look alike, one per step, the next one in the next step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from precision.interception import tensors_in
from precision.names import Api

Key = tuple[Any, ...]


class Rotation:
    """Picks calls, and pieces of large ones, so that each has its turn."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._turns: dict[Key, int] = {}
        self._pieces: dict[Key, int] = {}
        self._now: dict[Key, int] = {}
        self.steps = 0

    @staticmethod
    def key(api: Api, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        """Equal for calls that look alike: API, shapes and dtypes."""
        tensors: list[Tensor] = list(tensors_in((args, kwargs)))
        return (api.key, *((tensor.shape, tensor.dtype) for tensor in tensors))

    def turn(self, key: Key, pieces: int) -> int | None:
        """The piece of this call that is to be checked in this step, or None."""
        number = self._now.get(key, 0)
        self._now[key] = number + 1
        self._pieces[key] = pieces
        turn = self._turns.setdefault(key, 0)
        call, part = divmod(turn, pieces)
        return part if call == number else None

    def next_step(self) -> None:
        """Move every group to its next turn."""
        if not self._now:
            return
        self.steps += 1
        for key, count in self._now.items():
            self._counts[key] = max(count, self._counts.get(key, 0))
            self._turns[key] = (self._turns[key] + 1) % (self._counts[key] * self._pieces[key])
        self._now = {}

    @property
    def steps_needed(self) -> int:
        """Steps until every call of every group has been checked."""
        counts = {**self._counts, **{key: max(n, self._counts.get(key, 0)) for key, n in self._now.items()}}
        return max((count * self._pieces[key] for key, count in counts.items()), default=0)
