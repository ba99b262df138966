"""Small changes to a call's inputs, the same ones under the same seed.

Nothing here overflows, and zeros, infinities and NaN stay what they are: an attention mask full of the dtype's lowest
number survives.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor, nn

from precision.free_benchmark.distance import TINY, distance

# Elements of the table of random factors; longer tensors take it several times.
TABLE = 1 << 20
# Elements of a tensor that the size of its noise is measured on.
SAMPLE = 1 << 14
# Integer type of the same width, bits of the mantissa.
_BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}


def is_activation(value: Any) -> bool:
    """Whether a value is a tensor that is perturbed: floating-point numbers in plain memory that are no weights."""
    return (
        isinstance(value, Tensor)
        and value.dtype in _BITS
        and not isinstance(value, nn.Parameter)
        and value.layout == torch.strided
        and value.numel() > 0
    )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        entries = [map_tensors(entry, change) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    return value


class Noise:
    """Random factors between 1 - amplitude and 1, drawn once per dtype and device and taken from another place at every
    call."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._place = 0

    def restart(self) -> None:
        """Give out the same noise again, as at the beginning of every step."""
        self._place = 0

    def scale(self, tensor: Tensor) -> Tensor:
        """The tensor times random factors. A factor is never above 1, so nothing overflows."""
        count = tensor.numel()
        table = self._table(tensor.dtype, tensor.device)
        if count > TABLE // 2:
            table = table.repeat(-(-2 * count // TABLE))
        self._place = (self._place + 7919) % (TABLE // 2)
        return tensor * table[self._place : self._place + count].view(tensor.shape)

    def _table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self._tables[dtype, device]
        except KeyError:
            generator = torch.Generator().manual_seed(self._seed)
            factors = torch.rand(TABLE, generator=generator, dtype=torch.float64)
            table = factors.mul_(-amplitude(dtype)).add_(1).to(dtype).to(device)
            self._tables[dtype, device] = table
            return table


def amplitude(dtype: torch.dtype) -> float:
    """Largest relative change that add_noise makes: above the dtype's rounding, far below 1."""
    return float(torch.finfo(dtype).eps ** 0.9)


def flip_last_bit(tensor: Tensor) -> Tensor:
    """The tensor with the last mantissa bit of every normal number flipped."""
    integer, mantissa = _BITS[tensor.dtype]
    bits = tensor.contiguous().view(integer)
    # integer arithmetic throughout, in place: comparisons and where() are many times slower on a CPU
    smallest = 1 << mantissa
    infinity = torch.iinfo(integer).max + 1 - smallest
    below = bits & torch.iinfo(integer).max
    above = (infinity - 1) - below
    below.sub_(smallest).bitwise_or_(above)
    # an arithmetic shift: all ones where a difference was negative, so that the number is not a normal one
    flip = below.bitwise_right_shift_(torch.iinfo(integer).bits - 1).add_(1)
    return flip.bitwise_xor_(bits).view(tensor.dtype)


def swap_ends(tensor: Tensor) -> Tensor:
    """The tensor with its first and last element exchanged."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    if changed.numel() > 1:
        ends = _ends(changed)
        ends.copy_(ends.flip(0))
    return changed


def made_by_noise(tensor: Tensor, changed: Tensor) -> float:
    """Relative change of a tensor by noise that is relative to each element: any part shows how large it is."""
    part = slice(0, SAMPLE)
    small = distance(changed.reshape(-1)[part], tensor.detach().reshape(-1)[part]).overall
    return small or distance(changed, tensor).overall


def made_by_swap(changed: Tensor, size: float) -> float:
    """Relative change of a tensor of this L2 norm by swap_ends: two elements by the same amount."""
    if changed.numel() == 1:
        return 0.0
    first, last = _ends(changed).tolist()
    step = abs(first - last)
    return math.sqrt(2) * step / max(size, TINY) if 0.0 < step < math.inf else 0.0


def _ends(contiguous: Tensor) -> Tensor:
    return contiguous.view(-1)[:: contiguous.numel() - 1]
