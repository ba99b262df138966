"""One step's figures: which tensor each belongs to, and their way to the host."""

from __future__ import annotations

from typing import Iterable, NamedTuple

import torch
from torch import Tensor

from precision.monitor.records import Record, Scalar
from precision.monitor.statistics import Batch, Transfer


class Step(NamedTuple):
    """A step whose figures may still be on their way.

    Attributes:
        number: of the step.
        parts: records and transfer, per device.
        scalars: figures that the host knew.
    """

    number: int
    parts: list[tuple[list[Record], Transfer]]
    scalars: list[Scalar]

    @property
    def ready(self) -> bool:
        """Whether rows() needn't wait."""
        return all(transfer.ready for _, transfer in self.parts)

    def rows(self) -> list[tuple[Record, list[float]]]:
        """Every record with its figures, in the order in which they were measured; waits for the devices."""
        result: list[tuple[Record, list[float]]] = []
        for records, transfer in self.parts:
            figures = transfer.rows()
            result.extend((record, figures[record.row]) for record in records)
        return result


class Collector:
    """Takes tensors while a step runs.

    Attributes:
        on: whether this step is collected; hooks do nothing otherwise.
        micro_step: number of the current forward pass within the step, -1 before the first.
        passes: number of forward passes so far, over all steps.
    """

    def __init__(self, ops: Iterable[str], eps: float) -> None:
        self._ops = tuple(ops)
        self._eps = eps
        self._batches: dict[torch.device, tuple[Batch, list[Record]]] = {}
        self._scalars: list[Scalar] = []
        self.on = False
        self.micro_step = -1
        self.passes = 0

    def add(
        self, kind: str, name: str, tensor: Tensor, micro_step: int, vpp_stage: int, *, tracked: bool = True
    ) -> None:
        """Measure a tensor as it is now.

        Args:
            tracked: whether the version counter tells of each change, so that an unchanged tensor needn't be measured
                again.
        """
        if tensor.device.type == "meta":
            return
        batch, records = self._batch(tensor.device)
        row = batch.add(tensor, lasting=tracked)
        records.append(Record(kind, name, row, tensor.shape, tensor.dtype, micro_step, vpp_stage))

    def add_values(self, kind: str, names: list[str], values: Tensor, vpp_stage: int = 0) -> None:
        """Figures that are scalars on a device: (count,), one for each name."""
        batch, records = self._batch(values.device)
        first = batch.add_values(values)
        for place, name in enumerate(names):
            records.append(Record(kind, name, first + place, values.shape[:0], values.dtype, 0, vpp_stage))

    def add_scalar(self, kind: str, name: str, value: float) -> None:
        """A figure that the host knows."""
        self._scalars.append(Scalar(kind, name, value))

    def send(self, number: int) -> Step:
        """End the step: start its transfer, and begin anew."""
        with torch.no_grad():
            parts = [(records, batch.send()) for batch, records in self._batches.values() if records]
        step = Step(number, parts, self._scalars)
        # the batches' working memory stays
        self._batches = {device: (batch, []) for device, (batch, _) in self._batches.items()}
        self.drop()
        return step

    def drop(self) -> None:
        """Begin anew, without what hasn't been sent."""
        for batch, records in self._batches.values():
            if records:
                batch.clear()
                records.clear()
        self._scalars = []
        self.micro_step = -1

    def _batch(self, device: torch.device) -> tuple[Batch, list[Record]]:
        try:
            return self._batches[device]
        except KeyError:
            entry = self._batches[device] = (Batch(device, self._ops, self._eps), [])
            return entry
