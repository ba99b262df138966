"""Times are taken where the vocabulary says, and summarised without mixing units or rounds."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmark.metrics import PeakMemory, Spread, StepTimer, TokenClock, round_figures, summarise

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).resolve().parents[2]


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker(nn.Module):
    """A model whose calls take the given seconds on the fake clock."""

    def __init__(self, clock: FakeClock, seconds: list[float]) -> None:
        super().__init__()
        self.clock, self.seconds = clock, iter(seconds)

    def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
        self.clock.now += next(self.seconds)
        return input_ids


def test_first_call_is_prefill_and_decode_is_the_mean_of_the_others() -> None:
    clock = FakeClock()
    model = Worker(clock, [0.5, 0.01, 0.03, 9.0])
    with StepTimer(model, CPU, clock=clock) as timer:
        for _ in range(3):
            model(input_ids=torch.zeros(1))
            clock.now += 7.0  # between two calls: not the model's time
    model(input_ids=torch.zeros(1))  # after the timer: not counted
    assert timer.step_ms == pytest.approx([500, 10, 30])
    assert timer.prefill_ms == pytest.approx(500)
    assert timer.decode_ms == pytest.approx(20)


def test_one_call_has_no_decode_time_and_none_is_an_error() -> None:
    clock = FakeClock()
    model = Worker(clock, [0.5])
    with StepTimer(model, CPU, clock=clock) as timer:
        with pytest.raises(ValueError, match="not called"):
            _ = timer.prefill_ms
        model(input_ids=torch.zeros(1))
    assert timer.decode_ms is None


def test_hooks_go_away_when_the_model_fails() -> None:
    clock = FakeClock()
    model = Worker(clock, [])
    with pytest.raises(StopIteration), StepTimer(model, CPU, clock=clock):
        model(input_ids=torch.zeros(1))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_device_is_synchronised_before_and_after_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    events: list[str] = []
    monkeypatch.setattr("benchmark.metrics.synchronize", lambda device: events.append("sync"))
    model = Worker(clock, [1.0])
    model.register_forward_pre_hook(lambda module, args: events.append("call"))
    with StepTimer(model, CPU, clock=clock):
        model(input_ids=torch.zeros(1))
    assert events in (["sync", "call", "sync"], ["call", "sync", "sync"])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.lists(st.floats(0.001, 10), min_size=1, max_size=6))
def test_token_clock_counts_positions_of_any_batch(batch: int, gaps: list[float]) -> None:
    time = FakeClock()
    clock = TokenClock(clock=time)
    clock.put(torch.zeros(batch, 7))  # the prompt
    for gap in gaps:
        time.now += gap
        clock.put(torch.zeros(batch))
    clock.end()
    assert len(clock.arrivals) == len(gaps)
    assert clock.ttft_ms == pytest.approx(gaps[0] * 1000)
    assert clock.total_s == pytest.approx(sum(gaps))
    if len(gaps) > 1:
        assert clock.tpot_ms == pytest.approx(statistics.fmean(gaps[1:]) * 1000)
    else:
        assert clock.tpot_ms is None


def test_token_clock_without_tokens_is_an_error() -> None:
    clock = TokenClock()
    clock.put(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="no token"):
        _ = clock.ttft_ms
    with pytest.raises(ValueError, match="no token"):
        _ = clock.total_s


def test_throughput_counts_all_rows() -> None:
    time = FakeClock()
    model = Worker(time, [1.0, 0.5, 0.5])
    with StepTimer(model, CPU, clock=time) as timer:
        clock = TokenClock(clock=time)
        clock.put(torch.zeros(4, 9))
        for _ in range(3):
            model(input_ids=torch.zeros(4))
            clock.put(torch.zeros(4))
    figures = round_figures(timer, clock, batch_size=4)
    assert figures["tokens_per_s"] == pytest.approx(12 / 2.0)
    assert figures["decode_tokens_per_s"] == pytest.approx(4 / 0.5)
    assert figures["samples_per_s"] == pytest.approx(4 / 2.0)
    assert figures["step_ms"] == pytest.approx([1000, 500, 500])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_spread_is_median_and_range(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.minimum == min(values)
    assert spread.maximum == max(values)
    assert spread.minimum <= spread.median <= spread.maximum
    assert spread.as_dict() == {"median": statistics.median(values), "min": min(values), "max": max(values)}


def test_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


def test_summary_takes_numbers_only() -> None:
    rounds = [
        {"prefill_ms": 3.0, "decode_ms": None, "step_ms": [3.0], "shape": "a"},
        {"prefill_ms": 1.0, "decode_ms": None, "step_ms": [1.0], "shape": "b"},
    ]
    assert summarise(rounds) == {"prefill_ms": {"median": 2.0, "min": 1.0, "max": 3.0}}


def test_peak_memory_reads_the_high_water_mark(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t     512 kB\n")
    (tmp_path / "clear_refs").write_text("")
    memory = PeakMemory(CPU, proc=tmp_path)
    memory.reset()
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert memory.read_bytes() == 2048 * 1024
    assert memory.kind == "resident set of the process"


def test_peak_memory_says_so_when_it_cannot_be_reset(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").mkdir()  # writing to a folder fails, as it does where the kernel forbids it
    (tmp_path / "status").write_text("VmHWM:\t1 kB\n")
    memory = PeakMemory(CPU, proc=tmp_path)
    memory.reset()
    assert "since its start" in memory.kind


def test_peak_memory_without_a_high_water_mark_is_the_present_size(tmp_path: Path) -> None:
    memory = PeakMemory(CPU, proc=tmp_path / "nowhere")
    assert memory.read_bytes() > 10e6
    assert "keeps no peak" in memory.kind


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_peak_memory_sees_what_was_freed_again() -> None:
    # in a process of its own: the system may take idle memory away from a large one meanwhile
    script = (
        "import torch\n"
        "from benchmark.metrics import PeakMemory\n"
        "memory = PeakMemory(torch.device('cpu'))\n"
        "memory.reset()\n"
        "before = memory.read_bytes()\n"
        "block = torch.ones(256 * 2**20 // 4)\n"
        "del block\n"
        "print(memory.read_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 192 * 2**20
