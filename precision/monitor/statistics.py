"""Six figures of many tensors, computed on their device and read back in one transfer.

In host memory a C++ kernel reads each tensor once. Elsewhere, and for what the kernel is not for, small tensors are
copied when they are met and reduced together, one kernel for all of one size; large ones are reduced at once, in
pieces. Sums run in float32 (float64 for float64 tensors and between pieces).
"""

from __future__ import annotations

import math
from typing import Any, Iterable

import numpy as np
import torch
from torch import Tensor

from precision.dump.host_statistics import FIGURES, kernels
from precision.dump.known_tensors import HOST_DEVICES, KnownTensors, dense

# What each figure is, of a tensor x: norm is L2, zeros the share of elements with abs(x) < eps, nans their number.
OPS = ("norm", "min", "max", "mean", "zeros", "nans")
SMALL = 1 << 13
# Tensors that the kernel reads as fast as it is looked up whether they were measured before.
QUICK = 1 << 17
# Elements per piece: float32 copies of one stay in a host core's cache; a device takes larger ones to be kept busy.
HOST_PIECE = 1 << 17
DEVICE_PIECE = 1 << 21
# Small tensors are reduced as soon as their copies take this much.
STAGED_BYTES = 2 << 20
# What other subclasses hold may lie elsewhere, as may anything inside torch.func's transforms.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_ROW_BYTES = FIGURES * np.dtype(float).itemsize


class Transfer:
    """Figures on their way to the host."""

    def __init__(self, rows: list[list[float]], order: list[int], parts: list[Tensor]) -> None:
        """
        Args:
            rows: a row for each number that Batch.add returned, as far as it is known.
            order, parts: numbers of the others, and their figures.
        """
        self._rows = rows
        self._order = order
        self._event: Any = None
        self._host: Tensor | None = None
        if parts:
            packed = torch.cat(parts)
            device = packed.device
            if device.type in HOST_DEVICES:
                self._host = packed
            else:
                self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
                self._host.copy_(packed, non_blocking=True)
                self._event = getattr(torch, device.type).Event()
                self._event.record()

    @property
    def ready(self) -> bool:
        """Whether rows() needn't wait."""
        return self._event is None or bool(self._event.query())

    def rows(self) -> list[list[float]]:
        """One row of figures (in the order of OPS) for each number that Batch.add returned; waits for the device."""
        if self._host is not None:
            if self._event is not None:
                self._event.synchronize()
            for number, figures in zip(self._order, self._host.tolist()):
                self._rows[number] = figures
            self._host = None
        return self._rows


class Batch:
    """Collects the figures of the tensors of one device, step by step.

    Only the figures that are asked for are computed; the others' places hold NaN.
    """

    def __init__(self, device: torch.device, ops: Iterable[str] = OPS, eps: float = 1e-8) -> None:
        """
        Args:
            device: where the tensors are.
            ops: which figures, of OPS.
            eps: what counts as zero.
        """
        self._on_host = device.type in HOST_DEVICES
        # the backends of torch without float64 get float32, whose counts are exact up to 2^24
        self._wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._wanted = frozenset(ops)
        self._eps = eps
        self._kernels = kernels() if self._on_host else {}
        # 0 counts none
        self._kernel_eps = eps if "zeros" in self._wanted else 0.0
        # a row for each number, where the kernel writes, and where that lies
        self._table = np.empty((0, FIGURES))
        self._address = 0
        self._unwanted = [place for place, op in enumerate(OPS) if op not in self._wanted]
        self._unlooked = QUICK if self._kernels else SMALL
        self.clear()

    def add(self, tensor: Tensor, *, lasting: bool = False) -> int:
        """Measure a tensor as it is now; returns the number of its row.

        Args:
            tensor: of any dtype, shape and layout; its history of gradients is left alone.
            lasting: whether the same tensor object may come by again unchanged, which is looked up.
        """
        number = self._count
        looked_up = lasting and tensor.numel() > self._unlooked
        if looked_up:
            known = self._known.get(tensor)
            if known is not None:
                return known
        self._count += 1
        if not self._measure_on_host(number, tensor):
            self._measure_by_torch(number, tensor)
        if looked_up:
            self._known.put(tensor, number)
        return number

    def add_values(self, values: Tensor) -> int:
        """Let scalars travel with the figures: (count,) values, each the first of a row; returns the first row."""
        first = self._count
        count = values.shape[0]
        self._count += count
        if self._on_host:
            self._scalars.append((first, values.tolist()))
            return first
        self._order += range(first, first + count)
        unknown = values.new_full((count, len(OPS) - 1), math.nan, dtype=self._wide)
        self._parts.append(torch.cat([values.to(self._wide)[:, None], unknown], dim=1))
        return first

    def send(self) -> Transfer:
        """Start the transfer of everything added so far, and begin anew."""
        self._reduce_staged()
        transfer = Transfer(self._host_rows(), self._order, self._parts)
        self.clear()
        return transfer

    def clear(self) -> None:
        """Begin anew."""
        self._count = 0
        self._order: list[int] = []
        self._parts: list[Tensor] = []
        # on the host: number of the first, values
        self._scalars: list[tuple[int, list[float]]] = []
        self._staged: dict[tuple[torch.Size, torch.dtype], tuple[list[int], list[Tensor]]] = {}
        self._staged_bytes = 0
        self._known: KnownTensors[int] = KnownTensors(same_layout=False, devices_across_steps=False)

    def _measure_on_host(self, number: int, tensor: Tensor) -> bool:
        """Have the kernel fill in a row; False where it is not for the tensor, or finds that it isn't finite."""
        kernel = self._kernels.get(tensor.dtype)
        if kernel is None or type(tensor) not in _PLAIN_TYPES or torch._C._are_functorch_transforms_active():
            return False
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg():
            tensor = _flat(dense(tensor)).contiguous()
        size = tensor.numel()
        if not size:
            return False
        if number >= len(self._table):
            self._table = np.concatenate([self._table, np.empty((number + 64, FIGURES))])
            self._address = self._table.ctypes.data
        return kernel(tensor.data_ptr(), size, self._kernel_eps, self._address + number * _ROW_BYTES)

    def _host_rows(self) -> list[list[float]]:
        """The table, with rows that mean nothing, or none, for what torch measures."""
        table = self._table[: self._count]
        if self._unwanted:
            table[:, self._unwanted] = math.nan
        rows: list[list[float]] = table.tolist()
        rows += [[]] * (self._count - len(rows))
        for first, scalars in self._scalars:
            for place, scalar in enumerate(scalars):
                rows[first + place] = [scalar, *[math.nan] * (len(OPS) - 1)]
        return rows

    def _measure_by_torch(self, number: int, tensor: Tensor) -> None:
        size = tensor.numel()
        if size <= SMALL and tensor.layout == torch.strided and size and not tensor.is_complex():
            self._stage(number, size, tensor)
            return
        values = dense(tensor)
        self._order.append(number)
        self._parts.append(self._measure_large(values.abs() if values.is_complex() else values))

    def _stage(self, number: int, size: int, tensor: Tensor) -> None:
        # the copy keeps the value from later in-place changes
        copy = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
        key = (copy.shape, copy.dtype)
        try:
            numbers, copies = self._staged[key]
        except KeyError:
            numbers, copies = self._staged[key] = ([], [])
        numbers.append(number)
        copies.append(copy)
        self._staged_bytes += size * copy.element_size()
        if self._staged_bytes > STAGED_BYTES:
            self._reduce_staged()

    def _reduce_staged(self) -> None:
        for (_, dtype), (numbers, copies) in self._staged.items():
            rows = torch.stack(copies).reshape(len(copies), -1)
            figures = self._reduce(rows.to(torch.float64 if dtype == torch.float64 else torch.float32))
            self._order += numbers
            self._parts.append(figures)
        self._staged = {}
        self._staged_bytes = 0

    def _measure_large(self, values: Tensor) -> Tensor:
        size = values.numel()
        if size == 0:
            return torch.full((1, len(OPS)), math.nan, dtype=self._wide, device=values.device)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        length = min(HOST_PIECE if self._on_host else DEVICE_PIECE, size)
        buffer = torch.empty(1, length, dtype=wide, device=values.device)
        pieces = []
        for piece in _flat(values).split(length):
            row = buffer[:, : piece.numel()]
            row[0].copy_(piece)
            pieces.append(self._reduce(row, mean=False))
        figures = torch.cat(pieces)
        if len(pieces) > 1:
            norm = torch.linalg.vector_norm(figures[:, 0])
            rest = [figures[:, 1].amin(), figures[:, 2].amax(), *figures[:, 3:].sum(0).unbind()]
            figures = torch.stack([norm, *rest])[None]
        figures[:, 3:5] /= size
        return figures

    def _reduce(self, rows: Tensor, *, mean: bool = True) -> Tensor:
        """(count, size) to (count, len(OPS)); with mean off, sums and counts instead of means and shares.

        Writes to `rows`.
        """
        wanted = self._wanted
        unknown = rows.new_full((rows.shape[0],), math.nan)
        norm = torch.linalg.vector_norm(rows, dim=1) if wanted & {"norm", "nans", "zeros"} else unknown
        low = rows.amin(1) if "min" in wanted else unknown
        high = rows.amax(1) if "max" in wanted else unknown
        total = rows.sum(1) if "mean" in wanted else unknown
        nans = torch.zeros_like(norm)
        # a finite norm proves that there is no NaN; to read it costs nothing on a host, on a device it would wait
        if wanted & {"nans", "zeros"} and not (self._on_host and bool(norm.isfinite().all())):
            nans = torch.isnan(rows).sum(1).to(norm.dtype)
        zeros = unknown
        if "zeros" in wanted:
            # comparing into a float tensor and adding it up is several times faster on a host than counting booleans
            above = torch.ge(rows.abs_(), self._eps, out=rows).sum(1)
            zeros = rows.shape[1] - above - nans
        figures = torch.stack([norm, low, high, total, zeros, nans], dim=1).to(self._wide)
        if mean:
            figures[:, 3:5] /= rows.shape[1]
        return figures


def _flat(values: Tensor) -> Tensor:
    """All elements in one dimension, in any order, without a copy where the tensor has no gaps."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)
