"""Which modules are watched, and which tensors of what goes into and comes out of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from precision.errors import PrecisionError
from precision.monitor.config import SIDES, MonitorConfig, Target

_EVERYTHING = dict.fromkeys(SIDES, "all")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel or a DeepSpeed engine."""
    wrappers = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "PipelineEngine")
    while type(model).__name__ in wrappers:
        model = model.get_submodule("module")
    return model


def watched(model: nn.Module, config: MonitorConfig) -> dict[str, dict[str, str]]:
    """Selectors by side ("all" for every tensor), by the name of each module to hook.

    Raises:
        PrecisionError: for a module that there isn't, with the nearest names.
    """
    modules = dict(model.named_modules())
    # ModuleList and its kin only hold others and are never called
    names = {name for name, module in modules.items() if type(module).forward is not nn.Module.forward}
    result: dict[str, dict[str, str]] = {name: _EVERYTHING for name in sorted(names)} if config.all_xy else {}
    for name, target in config.targets.items():
        if name not in names:
            nearest = ", ".join(_nearest(name, names))
            if name in modules:
                kind = type(modules[name]).__name__
                raise PrecisionError(f"{name!r} is a {kind}, which is never called; watch what is in it: {nearest}")
            raise PrecisionError(f"no module {name!r} to watch; the nearest are {nearest}")
        result[name] = _sides(target)
    if config.forward_only or config.backward_only:
        kept = SIDES[:2] if config.forward_only else SIDES[2:]
        result = {name: {side: sides[side] for side in kept if side in sides} for name, sides in result.items()}
    return {name: sides for name, sides in result.items() if sides} if config.activations else {}


def _sides(target: Target) -> dict[str, str]:
    return target.model_dump(exclude_none=True) or _EVERYTHING


def _nearest(name: str, names: set[str]) -> list[str]:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
    return close or sorted(names)[1:4]


def entries(value: Any) -> list[Any]:
    """The entries of what a module takes or gives: of a tuple, list or mapping its values, else the value itself."""
    if isinstance(value, (tuple, list)):
        return list(value)
    return list(value.values()) if isinstance(value, Mapping) else [value]


def select(value: Any, selector: str, what: str) -> list[Tensor]:
    """The tensors that a selector names.

    Args:
        value: a tensor, or a tuple, list or mapping.
        selector: "all" for every tensor at the top, "tensor", or "tuple[N]:I".
        what: for the message.

    Raises:
        PrecisionError: when the value isn't of the selector's form; the message says what it is.
    """
    if selector == "all":
        return [entry for entry in entries(value) if isinstance(entry, Tensor)]
    given = entries(value)
    if selector == "tensor":
        found, fits = given[0] if given else None, len(given) == 1
    else:
        length, place = (int(part) for part in selector[len("tuple[") :].split("]:"))
        fits = len(given) == length and isinstance(value, (tuple, list, Mapping))
        found = given[place] if fits else None
    if not fits or not isinstance(found, Tensor):
        raise PrecisionError(f"{what} is {describe(value)}, which {selector!r} doesn't fit; write {_suggest(given)}")
    return [found]


def _suggest(given: list[Any]) -> str:
    places = [place for place, entry in enumerate(given) if isinstance(entry, Tensor)]
    if len(given) == 1 and places:
        return '"tensor"'
    if not places:
        return "another target: there is no tensor"
    return " or ".join(f'"tuple[{len(given)}]:{place}"' for place in places[:3])


def describe(value: Any) -> str:
    """A value in the words of the selectors, with the shapes."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {str(value.dtype)[len('torch.') :]}"
    if isinstance(value, (tuple, list, Mapping)):
        inside = ", ".join(
            describe(entry) if isinstance(entry, Tensor) else type(entry).__name__ for entry in entries(value)
        )
        return f"tuple[{len(value)}] ({inside})"
    return type(value).__name__


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a module is called with, as one tuple: positional arguments, then keyword arguments in the call's order."""
    return (*args, *kwargs.values()) if kwargs else args


def all_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What "all" means of inputs: the positional tensors, or the first keyword tensor where there is none.

    Keyword arguments of attention layers are masks and positions, whose figures say nothing.
    """
    found = [arg for arg in args if isinstance(arg, Tensor)]
    return found or next(([arg] for arg in kwargs.values() if isinstance(arg, Tensor)), [])


def print_struct(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The modules of a model with what goes in and out, one line each, as targets are written.

    Runs the model once, without gradients.

    Args:
        args, kwargs: what to call the model with.

    Returns:
        the lines, which are printed as well.
    """
    recorder = StructRecorder(unwrap(model))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        recorder.close()
    text = recorder.text()
    print(text)
    return text


class StructRecorder:
    """Notes what goes into and comes out of each module, until close()."""

    def __init__(self, model: nn.Module) -> None:
        self._lines: dict[str, str] = {}
        self._order = [name for name, _ in model.named_modules()]
        self._handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in model.named_modules()
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def text(self) -> str:
        """The lines, in the order of the modules."""
        return "\n".join(self._lines.get(name, f"{'  ' * _depth(name)}{name}: didn't run") for name in self._order)

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = arguments(args, kwargs)
            # one argument is written "tensor", like one result
            shown = describe(given[0] if len(given) == 1 else given)
            self._lines.setdefault(
                name,
                f"{'  ' * _depth(name)}{name or '(model)'} [{type(module).__name__}] input: {shown}; "
                f"output: {describe(result)}",
            )

        return hook


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
