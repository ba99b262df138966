"""The simulated NPU: every operator on an npu tensor is computed by the host, on the memory behind the tensor.

The stub libraries allocate "device" memory with malloc, so a CPU tensor over the same bytes can be made for any npu
tensor. torch_npu keeps what it is good at, allocation, views, streams; results are new npu tensors or, where an
operator wrote to its input, that input.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from npu_tuned_model.simulate import host_ops

# what torch_npu itself does right: it allocates, or only notes something
_LEFT_TO_TORCH_NPU = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_with_format",
    "get_npu_format",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
}
# may return their input, but also compute
_NO_MERE_VIEWS = {"contiguous", "reshape", "to", "_to_copy"}

_this_thread = threading.local()


@contextlib.contextmanager
def inside_ge_graph() -> Iterator[None]:
    """What is computed in here are nodes of a GE graph, not eager calls."""
    _this_thread.in_graph = True
    try:
        yield
    finally:
        _this_thread.in_graph = False


class SimulatedDevice(TorchDispatchMode):
    """Computes on the host what is asked of an NPU; active from ``with`` on, in this thread."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile works under this mode as if it weren't there."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = _npu_of(args, kwargs)
        if device is None or _is_left_to_torch_npu(func):
            return func(*args, **kwargs)
        if func._schema.name == "npu::npu_format_cast":
            return _cast_format(*args)
        originals: dict[int, Tensor] = {}
        host_args, host_kwargs = tree_map(lambda value: _to_host(value, originals), (args, kwargs))
        target = device
        if "device" in host_kwargs:
            asked = kwargs["device"]
            target = torch.device(asked) if asked is not None else device
            host_kwargs["device"] = torch.device("cpu")
        # torchair's own operators ("air") are twins of torch_npu's with other types of arguments
        if func.namespace in ("npu", "air"):
            results = host_ops.compute(func, host_args, host_kwargs, in_graph=getattr(_this_thread, "in_graph", False))
        else:
            results = func(*host_args, **host_kwargs)
        if func.namespace == "_c10d_functional":
            # the results are copied to the device now, not when they are waited for
            results = tree_map(_waited_for, results)
        return tree_map(lambda value: _from_host(value, target, originals), results)


def _is_left_to_torch_npu(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return name in _LEFT_TO_TORCH_NPU or (func.is_view and name not in _NO_MERE_VIEWS)


def _npu_of(args: Any, kwargs: Any) -> torch.device | None:
    """The NPU that a call is about, by its tensors or its device argument."""
    for value in tree_flatten((args, kwargs))[0]:
        device = value.device if isinstance(value, Tensor) else value
        if isinstance(device, torch.device) and device.type == "npu":
            return device
    return None


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of an npu tensor; lives no longer than that."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    if count == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _cast_format(tensor: Tensor, acl_format: int) -> Tensor:
    """A copy whose storage is marked with the format; the values lie in it as in any other tensor."""
    import torch_npu

    # as on the device, this makes a plain tensor unless torch.npu.config.allow_internal_format is on
    result = torch_npu.empty_with_format(tensor.shape, dtype=tensor.dtype, device=tensor.device, acl_format=acl_format)
    host_view(result).copy_(host_view(tensor))
    return result


def _to_host(value: Any, originals: dict[int, Tensor]) -> Any:
    if isinstance(value, torch.Generator) and value.device.type == "npu":
        raise NotImplementedError("the simulated NPU draws from the CPU's generator; pass generator=None")
    if not isinstance(value, Tensor) or value.device.type != "npu":
        return value
    twin = host_view(value)
    originals[id(twin)] = value
    return twin


def _waited_for(value: Any) -> Any:
    return torch.ops._c10d_functional.wait_tensor(value) if isinstance(value, Tensor) else value


def _from_host(value: Any, device: torch.device, originals: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) in originals:
        return originals[id(value)]
    if device.type != "npu" or value.device.type != "cpu":
        return value
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    host_view(result).copy_(value)
    return result


def start() -> None:
    """Begin to simulate, in this thread and in every thread that is started from now on."""
    SimulatedDevice().__enter__()
    start_thread = threading.Thread.start

    def start_simulated(thread: threading.Thread) -> None:
        run = thread.run

        def run_simulated() -> None:
            with SimulatedDevice():
                run()

        thread.run = run_simulated  # type: ignore[method-assign]
        start_thread(thread)

    threading.Thread.start = start_simulated  # type: ignore[assignment,method-assign]
