"""Seeing every API call of a region of code without patching any API: torch's own function mode.

What a mode can't see is a plain Python function, such as an operator table's entry or a collective. Those are named one
by one (``Registry``) and made visible for the time of the region only.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Protocol

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from precision import names
from precision.errors import PrecisionError
from precision.names import Api

# Collectives are Python functions that torch's modes don't see.
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)


class ApiObserver(Protocol):
    """What is told of every API call, and makes it."""

    def call(self, api: Api, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``function(*args, **kwargs)`` and return what the model is to go on with.

        Nothing that happens inside is observed: neither the function's own APIs nor the observer's.
        """


class ApiInterception(TorchFunctionMode):
    """Routes the API calls of this thread to an observer while entered."""

    def __init__(self, observer: ApiObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        api = names.api_of(func)
        if api is None:
            return func(*args, **(kwargs or {}))
        return self._observer.call(api, func, args, kwargs or {})


class Registry:
    """Python functions that count as APIs, by the object that holds them."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Api]] = []
        self._originals: list[tuple[Any, str, Any, Any]] = []

    def add(self, owner: Any, attributes: Iterable[str] | dict[str, str], family: str) -> None:
        """Name functions that are attributes of `owner` (a module, a class instance, frozen or not).

        Args:
            owner: where callers look the functions up.
            attributes: the attributes' names, or a mapping from attribute to the name in the dump.
            family: the family in the dump, such as "NPU".

        Raises:
            PrecisionError: for a name that `owner` doesn't have.
        """
        named = attributes if isinstance(attributes, dict) else {attribute: attribute for attribute in attributes}
        for attribute, name in named.items():
            if not callable(getattr(owner, attribute, None)):
                raise PrecisionError(f"{owner!r} has no function {attribute!r} to register as an API")
            # asked for by name, so never left out
            self._entries.append((owner, attribute, Api(f"{family}.{name}", shape_only=False, core=True)))

    def show(self) -> int:
        """Make the functions visible; how many there are."""
        for owner, attribute, api in self._entries:
            own = vars(owner).get(attribute)
            replacement = visible(getattr(owner, attribute), api)
            object.__setattr__(owner, attribute, replacement)
            self._originals.append((owner, attribute, own, replacement))
        return len(self._originals)

    def hide(self) -> None:
        """Put everything back."""
        for owner, attribute, original, replacement in reversed(self._originals):
            if original is None:
                # it came from the owner's class
                object.__delattr__(owner, attribute)
            else:
                object.__setattr__(owner, attribute, original)
            names.forget(replacement)
        self._originals = []


def visible(function: Callable[..., Any], api: Api) -> Callable[..., Any]:
    """The same function, but torch's function modes see it called as `api`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() == 0:
            return function(*args, **kwargs)
        return handle_torch_function(call, (), *args, **kwargs)

    names.remember(call, api)
    return call


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
