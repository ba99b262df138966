"""Recognising a tensor that has been seen before and has not changed since."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")

# Elements compared to see whether a weight was written past its version counter since an earlier step.
SAMPLE = 16
# Where an element can be read without waiting for a device.
HOST_DEVICES = ("cpu",)


class KnownTensors(Generic[Value]):
    """Remembers one value per tensor content.

    Within a step the tensor's version counter tells whether it was changed. Into the next step only weights are
    remembered, and a sample of their elements is compared as well: an optimiser may write to ``parameter.data``, which
    no counter sees.
    """

    def __init__(self, *, same_layout: bool, devices_across_steps: bool) -> None:
        """
        Args:
            same_layout: whether views that hold the same elements in another shape or order count as different.
            devices_across_steps: whether a weight on a device is recognised in the next step, at the price of waiting
                for the device when it is.
        """
        self._same_layout = same_layout
        self._devices_across_steps = devices_across_steps
        self._entries: dict[int, tuple[weakref.ref[Tensor], dict[Any, Value]]] = {}
        self._samples: dict[int, Tensor] = {}

    def get(self, tensor: Tensor) -> Value | None:
        """What was remembered of this content, or None."""
        owner, key = self._identity(tensor)
        entry = self._entries.get(id(owner))
        if key is None or entry is None or entry[0]() is not owner or key not in entry[1]:
            return None
        sample = self._samples.pop(id(owner), None)
        if sample is not None and not torch.equal(sample, _sample(owner)):
            del self._entries[id(owner)]
            return None
        return entry[1][key]

    def put(self, tensor: Tensor, value: Value) -> None:
        """Remember a value for this content."""
        owner, key = self._identity(tensor)
        if key is None:
            return
        entry = self._entries.get(id(owner))
        if entry is None or entry[0]() is not owner:
            entry = (weakref.ref(owner), {})
            self._entries[id(owner)] = entry
            self._samples.pop(id(owner), None)
        elif next(iter(entry[1]))[0] != key[0]:
            # an older version will not come back
            entry[1].clear()
        entry[1][key] = value

    def forget(self, tensor: Tensor) -> None:
        """It was written to in a way that no version counter sees."""
        self._entries.pop(id(tensor if tensor._base is None else tensor._base), None)

    def next_step(self) -> None:
        """Forget everything but weights."""
        kept = {}
        self._samples = {}
        for number, entry in self._entries.items():
            owner = entry[0]()
            if isinstance(owner, torch.nn.Parameter) and (
                self._devices_across_steps or owner.device.type in HOST_DEVICES
            ):
                kept[number] = entry
                self._samples[number] = _sample(owner)
        self._entries = kept

    def _identity(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Whose memory a tensor shows, and a key that is equal for tensors with the same content.

        The key starts with the version, and is None for tensors whose changes can't be seen (inference mode counts
        none).
        """
        if tensor.is_inference():
            return tensor, None
        if tensor.layout != torch.strided:
            return tensor, (tensor._version, tensor.layout)
        base = tensor._base
        owner = tensor if base is None else base
        shape, strides = tensor.shape, tensor.stride()
        where: Any = (shape, strides)
        if not self._same_layout:
            steps = [(size, stride) for size, stride in zip(shape, strides) if size > 1]
            extent = 1 + sum((size - 1) * stride for size, stride in steps)
            if extent == tensor.numel() and len({stride for _, stride in steps}) == len(steps):
                where = extent
        return owner, (tensor._version, tensor.storage_offset(), tensor.dtype, where)


def dense(tensor: Tensor) -> Tensor:
    """The values of a tensor in plain memory, without its gradient history."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided:
        return tensor.dequantize() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return tensor.to_dense()
    return tensor.values()


def _sample(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return torch.empty(0)
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()
