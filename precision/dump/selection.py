"""Which records are dumped: scope, list, token range, direction."""

from __future__ import annotations

from typing import Sequence

from precision.config import Config


class Selection:
    """Decides record by record, in the order in which they come.

    Attributes:
        matched: how many records each entry of list and scope has matched.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        modes = set(config.data_mode)
        everything = "all" in modes or not modes
        directions = modes & {"forward", "backward"}
        sides = modes & {"input", "output"}
        self.forward = everything or "forward" in directions or not directions
        self.backward = everything or "backward" in directions or not directions
        self.inputs = everything or "input" in sides or not sides
        self.outputs = everything or "output" in sides or not sides
        self.matched: dict[str, int] = dict.fromkeys([*config.list, *config.scope], 0)
        self._inside_scope = not config.scope
        self._scope_over = False

    def new_step(self) -> None:
        """The scope opens anew in every step."""
        self._inside_scope = not self._config.scope
        self._scope_over = False

    def token(self, number: int) -> bool:
        """Whether the model's call of this number (0 is the first of the step) is dumped."""
        limits = self._config.token_range
        return limits is None or limits[0] <= number <= limits[1]

    def record(self, name: str, enclosing: Sequence[str]) -> bool:
        """Whether a forward record is dumped.

        Args:
            name: of the record.
            enclosing: the modules' records that it is inside of.
        """
        return self._in_scope(name) and self._in_list(name, enclosing)

    def saves_tensors(self, name: str) -> bool:
        """Whether the record's tensors are written as files."""
        if self._config.task == "tensor":
            return True
        return self._config.task == "statistics" and any(part in name for part in self._config.tensor_list)

    def leave(self, name: str) -> None:
        """A module's record is complete: it may be the scope's last one."""
        if self._config.scope and name == self._config.scope[1]:
            self._scope_over = True

    def _in_scope(self, name: str) -> bool:
        if not self._config.scope:
            return True
        if self._scope_over:
            return False
        first, last = self._config.scope
        if name == first:
            self._inside_scope = True
            self.matched[first] += 1
        inside = self._inside_scope
        if name == last:
            self.matched[last] += 1
            # a module's inside belongs to the scope as well: it is over when the module is left
            self._scope_over = not name.startswith(("Module.", "Cell."))
        return inside

    def _in_list(self, name: str, enclosing: Sequence[str]) -> bool:
        if not self._config.list:
            return True
        hit = False
        names = [name, *enclosing] if self._config.level == "mix" else [name]
        for entry in self._config.list:
            if any(entry in candidate for candidate in names):
                self.matched[entry] += 1
                hit = True
        return hit
