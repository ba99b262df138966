"""Times of one generation and what follows from them.

Vocabulary: prefill is the first call of the model in a generation, decode the mean of the later ones, each with a
device sync before and after. TTFT (time to first token) and TPOT (time per output token) are taken where a user would
take them: when tokens reach the host.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.generation.streamers import BaseStreamer

from npu_tuned_model.device import synchronize

Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Median and range of a few measurements."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Raises ValueError for an empty list."""
        if not values:
            raise ValueError("no measurements to take a median of")
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.minimum, "max": self.maximum}


class StepTimer:
    """Context manager that times every call of a model: the first is prefill, the others are decode.

    It hooks the outermost module, so it works for any model that generate() drives.

    Attributes:
        step_ms: milliseconds of each call, in order.
        host_ms: how long the host took to issue each call; nearly all of step_ms where the host computes itself.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, clock: Clock = time.perf_counter) -> None:
        self.step_ms: list[float] = []
        self.host_ms: list[float] = []
        self._model, self._device, self._clock = model, device, clock
        self._start = 0.0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> StepTimer:
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        synchronize(self._device)
        self._start = self._clock()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.host_ms.append((self._clock() - self._start) * 1000)
        synchronize(self._device)
        self.step_ms.append((self._clock() - self._start) * 1000)

    @property
    def prefill_ms(self) -> float:
        """Raises ValueError when the model was never called."""
        if not self.step_ms:
            raise ValueError("the model was not called while the timer was on")
        return self.step_ms[0]

    @property
    def decode_ms(self) -> float | None:
        """Mean of the calls after the first; None when there was only one."""
        return statistics.fmean(self.step_ms[1:]) if len(self.step_ms) > 1 else None

    @property
    def decode_host_ms(self) -> float | None:
        """Mean time to issue the calls after the first; None when there was only one, or the host computes itself."""
        if self._device.type == "cpu" or len(self.host_ms) < 2:
            return None
        return statistics.fmean(self.host_ms[1:])


class TokenClock(BaseStreamer):
    """A streamer that notes when each position's tokens (one per row) reach the host. Any batch size.

    Attributes:
        arrivals: clock readings, one per generated position.
    """

    def __init__(self, *, clock: Clock = time.perf_counter) -> None:
        self.arrivals: list[float] = []
        self._clock = clock
        self._start = clock()
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """generate() hands over the prompt first, which is not counted."""
        if self._prompt_seen:
            self.arrivals.append(self._clock())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back that would have to be flushed."""

    @property
    def ttft_ms(self) -> float:
        """From the clock's construction to the first token. Raises ValueError without any token."""
        if not self.arrivals:
            raise ValueError("no token was generated")
        return (self.arrivals[0] - self._start) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between later tokens; None when there was only one."""
        if len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) * 1000 / (len(self.arrivals) - 1)

    @property
    def total_s(self) -> float:
        """From the clock's construction to the last token. Raises ValueError without any token."""
        if not self.arrivals:
            raise ValueError("no token was generated")
        return self.arrivals[-1] - self._start


def round_figures(timer: StepTimer, clock: TokenClock, batch_size: int) -> dict[str, Any]:
    """The raw figures of one timed generation, units in the keys."""
    tokens = batch_size * len(clock.arrivals)
    return {
        "prefill_ms": timer.prefill_ms,
        "decode_ms": timer.decode_ms,
        "decode_host_ms": timer.decode_host_ms,
        "between_steps_ms": None
        if clock.tpot_ms is None or timer.decode_ms is None
        else clock.tpot_ms - timer.decode_ms,
        "step_ms": list(timer.step_ms),
        "ttft_ms": clock.ttft_ms,
        "tpot_ms": clock.tpot_ms,
        "total_s": clock.total_s,
        "tokens_per_s": tokens / clock.total_s,
        "decode_tokens_per_s": None if timer.decode_ms is None else batch_size * 1000 / timer.decode_ms,
        "samples_per_s": batch_size / clock.total_s,
    }


def summarise(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and range over rounds of every figure that each round has."""
    summary = {}
    for key, value in rounds[0].items():
        if isinstance(value, (int, float)):
            summary[key] = Spread.of([figures[key] for figures in rounds]).as_dict()
    return summary


class PeakMemory:
    """Peak memory from reset() on: the device's, or on a CPU the process's resident set (Linux: VmHWM).

    Attributes:
        kind: what is measured, in words.
    """

    def __init__(self, device: torch.device, *, proc: Path = Path("/proc/self")) -> None:
        self._device, self._proc = device, proc
        self.kind = (
            f"{device.type} memory allocated by torch" if device.type != "cpu" else "resident set of the process"
        )

    def reset(self) -> None:
        """Start a new peak; where the system doesn't allow that, `kind` says so."""
        if self._device.type != "cpu":
            getattr(torch, self._device.type).reset_peak_memory_stats(self._device)
            return
        try:
            (self._proc / "clear_refs").write_text("5")  # 5: reset the peak of the resident set (proc(5))
        except OSError:
            self.kind = "resident set of the process since its start (the system doesn't let us reset it)"

    def read_bytes(self) -> int:
        """The peak so far; on systems without VmHWM the present size, and `kind` says so."""
        if self._device.type != "cpu":
            return int(getattr(torch, self._device.type).max_memory_allocated(self._device))
        with contextlib.suppress(FileNotFoundError):
            for line in (self._proc / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        self.kind = "resident set of the process now (this system keeps no peak)"
        return int(psutil.Process().memory_info().rss)
