"""Largest, smallest and mean value and L2 norm of many tensors, measured on their device and read back all at once.

Sums run in float32 (float64 for float64 tensors). A tensor that comes by again unchanged is not measured again: the
output of one API is the input of the next, and a weight is the same in every step.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from precision.dump import known_tensors
from precision.dump.host_statistics import host_figures
from precision.dump.known_tensors import KnownTensors, dense

# Pieces of this many elements stay in the cache between the passes over them.
CHUNK = 1 << 18


class Measured:
    """What was measured of one tensor; the figures are there after StatisticsBatch.flush().

    Attributes:
        max, min, mean, norm: None for an empty tensor; mean and norm None for integers and booleans.
        nan_count, inf_count: elements that are NaN or infinite.
        crc: CRC-32 of the bytes as 8 hex digits, where asked for.
    """

    __slots__ = ("crc", "inf_count", "max", "mean", "min", "nan_count", "norm")

    def __init__(self) -> None:
        self.max: Any = None
        self.min: Any = None
        self.mean: float | None = None
        self.norm: float | None = None
        self.nan_count = 0
        self.inf_count = 0
        self.crc: str | None = None


class StatisticsBatch:
    """Measures tensors, without waiting for their device, until flush()."""

    def __init__(self, *, checksum: bool = False) -> None:
        self._checksum = checksum
        self._pending: dict[torch.device, list[tuple[Measured, int, str, list[Tensor]]]] = {}
        self._known: KnownTensors[Measured] = KnownTensors(same_layout=checksum, devices_across_steps=False)

    def measure(self, tensor: Tensor) -> Measured:
        """The statistics of a tensor of any dtype and layout; call it where no mode is active and grad is off."""
        measured = self._known.get(tensor)
        if measured is None:
            measured = Measured()
            if tensor.device.type != "meta":
                values = dense(tensor)
                if values.numel():
                    self._measure(values, measured)
                if self._checksum:
                    measured.crc = f"{zlib.crc32(_bytes(values)):08x}"
            self._known.put(tensor, measured)
        return measured

    def forget(self, tensor: Tensor) -> None:
        """See KnownTensors.forget."""
        self._known.forget(tensor)

    def flush(self) -> None:
        """Read everything back, one transfer per device, and fill in the figures."""
        for pending in self._pending.values():
            groups: dict[torch.dtype, list[Tensor]] = {}
            for _, _, _, figures in pending:
                groups.setdefault(figures[0].dtype, []).extend(figures)
            packed = torch.cat([torch.stack(figures).view(torch.uint8) for figures in groups.values()])
            rest = packed.to("cpu")
            columns = {}
            for dtype, figures in groups.items():
                width = len(figures) * figures[0].element_size()
                columns[dtype] = iter(rest[:width].clone().view(dtype).tolist())
                rest = rest[width:]
            for measured, numel, kind, figures in pending:
                column = columns[figures[0].dtype]
                _fill(measured, numel, kind, [next(column) for _ in figures])
        self._pending = {}
        self._known.next_step()

    def _measure(self, values: Tensor, measured: Measured) -> None:
        if values.is_complex():
            values = values.abs()
        figures_now = host_figures(values)
        if figures_now is not None:
            measured.max, measured.min, measured.mean, measured.norm = figures_now
            return
        if values.is_floating_point():
            figures, kind = _float_figures(values), "float"
        elif values.dtype == torch.bool:
            figures, kind = [values.any().long(), values.all().long()], "bool"
        else:
            figures, kind = [values.amax().long(), values.amin().long()], "int"
        self._pending.setdefault(values.device, []).append((measured, values.numel(), kind, figures))


def _float_figures(values: Tensor) -> list[Tensor]:
    """max, min, sum, L2 norm, and for anything but a host tensor of finite values the counts of NaN and infinity."""
    if values.numel() > CHUNK and values.is_contiguous() and values.device.type in known_tensors.HOST_DEVICES:
        parts = [_piece(piece) for piece in values.view(-1).split(CHUNK)]
        highest, lowest, sums, norms = (torch.stack(column) for column in zip(*parts))
        figures = [highest.amax(), lowest.amin(), sums.sum(), torch.linalg.vector_norm(norms)]
    else:
        figures = _piece(values)
    # a finite norm proves every element finite, and reading it costs nothing on the host; on a device it would wait
    if values.device.type in known_tensors.HOST_DEVICES and math.isfinite(float(figures[3])):
        return figures
    counted = values if values.element_size() > 1 else values.float()
    counts = [torch.isnan(counted).sum(), torch.isinf(counted).sum()]
    return figures + [count.to(figures[0].dtype) for count in counts]


def _piece(values: Tensor) -> list[Tensor]:
    if values.is_contiguous():
        values = values.view(-1)
    if values.dtype in (torch.float32, torch.float64):
        return [values.amax(), values.amin(), values.sum(), torch.linalg.vector_norm(values)]
    wide = values.float()
    # the extremes are the same in the narrow type, with half the bytes to read; float8 has no aminmax
    low, high = torch.aminmax(values if values.element_size() > 1 else wide)
    return [high.float(), low.float(), wide.sum(), torch.linalg.vector_norm(wide)]


def _fill(measured: Measured, numel: int, kind: str, figures: list[Any]) -> None:
    measured.max, measured.min = figures[0], figures[1]
    if kind == "bool":
        measured.max, measured.min = bool(figures[0]), bool(figures[1])
    if kind == "float":
        measured.mean, measured.norm = figures[2] / numel, figures[3]
        if len(figures) > 4:
            measured.nan_count, measured.inf_count = int(figures[4]), int(figures[5])


def _bytes(values: Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).cpu().numpy() if values.numel() else b""
