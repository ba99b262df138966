"""Running a call a second time as if the first had never been: on copies, with the generators' state put back."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.free_benchmark.perturb import map_tensors
from precision.free_benchmark.pieces import wide_linear
from precision.interception import COLLECTIVES, tensors_in
from precision.names import Api

_WRITING_OPERATORS = """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__
"""
_WRITING = frozenset(_WRITING_OPERATORS.split())
_ONCE = {name: "a collective runs once: the other ranks don't take part a second time" for name in COLLECTIVES}
_ONCE["npu_mm_all_reduce_base"] = _ONCE["all_reduce"]
_ONCE["backward"] = "it frees the graph it runs through"

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
}


class CannotRerunError(Exception):
    """Why a call is not run again; the report says it."""


def call_name(api: Api) -> str:
    """The API's name without its family."""
    return api.key.rpartition(".")[2]


class Call:
    """One API call, kept so that it can be made again.

    To be made before the call itself: arguments that it may write to are copied then.
    """

    def __init__(self, api: Api, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Raises:
            CannotRerunError: for calls that can't be made twice.
        """
        self.key = api.key
        self.name = call_name(api)
        if self.name in _ONCE:
            raise CannotRerunError(_ONCE[self.name])
        self.function = function
        self.in_place = writes(self.name, function, args, kwargs)
        self.args: tuple[Any, ...] = map_tensors(args, _copy) if self.in_place else args
        self.kwargs: dict[str, Any] = map_tensors(kwargs, _copy) if self.in_place else kwargs
        self.inputs = list(tensors_in((args, kwargs)))
        self._versions = [_version(tensor) for tensor in self.inputs]
        self._generators = Generators(self.inputs, kwargs.get("generator"))
        self.random = False

    def done(self) -> None:
        """The call itself has been made.

        Raises:
            CannotRerunError: when it wrote to an input of which there is no copy.
        """
        self.random = self._generators.moved()
        if not self.in_place:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise CannotRerunError when an input was written to since the call."""
        if [_version(tensor) for tensor in self.inputs] != self._versions:
            _learned.add(self.function)
            raise CannotRerunError("it wrote to an input without saying so; from its next call on it is run on copies")

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call with other arguments; random numbers are those of the first time.

        Raises:
            CannotRerunError: when the function refuses them.
        """
        try:
            if not self.random:
                return self.function(*args, **kwargs)
            with self._generators.as_before():
                return self.function(*args, **kwargs)
        except CannotRerunError:
            raise
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:160]
            raise CannotRerunError(f"{type(error).__name__}: {text}") from error

    def again_wider(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for arguments in a wider precision; a linear layer goes to a faster library where there is one."""
        fast = wide_linear(args, kwargs) if self.function is F.linear else None
        return self.again(args, kwargs) if fast is None else fast

    def rewind(self) -> None:
        """Put the generators back to where they were before the call."""
        if self._generators.moved():
            self._generators.put_back()

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a run that may write to them."""
        if not self.in_place:
            return self.args, self.kwargs
        args, kwargs = map_tensors((self.args, self.kwargs), _copy)
        return args, kwargs


class Generators:
    """The states of the random number generators that a call can draw from."""

    def __init__(self, tensors: list[Tensor], generator: torch.Generator | None) -> None:
        self._own = generator
        self._devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._before = self._states()

    def moved(self) -> bool:
        """Whether any has drawn since."""
        return any(not torch.equal(now, before) for now, before in zip(self._states(), self._before))

    def as_before(self) -> _Restored:
        """A context in which they draw the same numbers once more."""
        return _Restored(self)

    def put_back(self) -> None:
        """Draw the same numbers again from here on."""
        self._set(self._before)

    def _states(self) -> list[Tensor]:
        states = [torch.default_generator.get_state()]
        states += [getattr(torch, device.type).get_rng_state(device) for device in self._devices]
        return states + ([self._own.get_state()] if self._own is not None else [])

    def _set(self, states: list[Tensor]) -> None:
        rest = iter(states)
        torch.default_generator.set_state(next(rest))
        for device in self._devices:
            getattr(torch, device.type).set_rng_state(next(rest), device)
        if self._own is not None:
            self._own.set_state(next(rest))


class _Restored:
    def __init__(self, generators: Generators) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._now = self._generators._states()
        self._generators.put_back()

    def __exit__(self, *error: Any) -> None:
        self._generators._set(self._now)


# functions that were seen to write to an input though nothing in their call says so
_learned: set[Any] = set()
_inplace_places: dict[Any, int | None] = {}


def writes(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to one of its inputs, as far as its name and arguments tell."""
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITING:
        return True
    if kwargs.get("inplace") is True or kwargs.get("out") is not None or function in _learned:
        return True
    if True not in [value for value in args if isinstance(value, bool)]:
        return False
    place = _inplace_place(function)
    return place is not None and place < len(args) and args[place] is True


def widest(value: Any) -> torch.dtype | None:
    """The dtype for running a call in a wider precision; None where nothing in its arguments is floating-point."""
    found = [tensor.dtype for tensor in tensors_in(value) if tensor.dtype in WIDER]
    found += _dtype_arguments(value)
    targets = {WIDER[dtype] for dtype in found if dtype in WIDER}
    if not targets:
        return None
    return max(targets - {torch.complex128} or {torch.float64}, key=lambda dtype: torch.finfo(dtype).bits)


def widen(value: Any, target: torch.dtype, device: torch.device | None = None) -> Any:
    """Nested arguments with every floating-point tensor and dtype argument in `target`, moved to `device`."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
            raise CannotRerunError("its weight is packed for one dtype (oneDNN layout)")
        if tensor.dtype.is_floating_point:
            return tensor.to(device=device, dtype=target)
        if tensor.is_complex():
            return tensor.to(device=device, dtype=torch.complex128)
        return tensor if device is None else tensor.to(device)

    return _map_dtypes(map_tensors(value, change), target, device)


def _map_dtypes(value: Any, target: torch.dtype, device: torch.device | None) -> Any:
    if isinstance(value, torch.dtype):
        return target if value.is_floating_point else value
    if isinstance(value, torch.device):
        return value if device is None else device
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_map_dtypes(entry, target, device) for entry in value)
    if isinstance(value, dict):
        return {key: _map_dtypes(entry, target, device) for key, entry in value.items()}
    return value


def _dtype_arguments(value: Any) -> list[torch.dtype]:
    if isinstance(value, torch.dtype):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [dtype for entry in value for dtype in _dtype_arguments(entry)]


def _inplace_place(function: Callable[..., Any]) -> int | None:
    if function not in _inplace_places:
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            # a built-in: those spell writing with an underscore or out=
            names = []
        _inplace_places[function] = names.index("inplace") if "inplace" in names else None
    return _inplace_places[function]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.layout == torch.strided else tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
