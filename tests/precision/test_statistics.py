"""Statistics and checksums equal a plain recomputation, for every dtype, with one read from the device per step."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import Net, records
from torch.utils._python_dispatch import TorchDispatchMode

from precision import PrecisionDebugger, cpp_library
from precision.dump import host_statistics, known_tensors, statistics
from precision.dump.statistics import CHUNK, Measured, StatisticsBatch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def measure(tensor: torch.Tensor, **options: Any) -> Measured:
    batch = StatisticsBatch(**options)
    measured = batch.measure(tensor)
    batch.flush()
    return measured


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    shape=st.lists(st.integers(1, 7), max_size=4),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_floats_equal_a_plain_recomputation(dtype: Any, shape: list[int], transposed: bool, seed: int) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)
    tensor = tensor.transpose(0, -1) if transposed and tensor.dim() > 1 else tensor
    wide = tensor.double()
    measured = measure(tensor)
    assert (measured.max, measured.min) == (wide.max().item(), wide.min().item())
    assert measured.mean == pytest.approx(wide.mean().item(), rel=1e-5, abs=1e-6)
    assert measured.norm == pytest.approx(wide.norm().item(), rel=1e-5)
    assert (measured.nan_count, measured.inf_count) == (0, 0)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_longer_than_a_chunk(dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(statistics, "host_figures", lambda values: None)
    tensor = torch.randn(2 * CHUNK + 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    measured, wide = measure(tensor), tensor.double()
    assert (measured.max, measured.min) == (wide.max().item(), wide.min().item())
    assert measured.mean == pytest.approx(wide.mean().item(), abs=1e-6)
    assert measured.norm == pytest.approx(wide.norm().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 4096, 4097, 2 * 4096 + 64 + 5])
def test_the_kernel_reads_every_element_once(dtype: torch.dtype, count: int) -> None:
    assert host_statistics.why_not() is None
    for place in {0, count // 2, count - 1}:
        tensor = torch.ones(count + 2, dtype=dtype)[1:-1]
        tensor[place] = 3
        figures = host_statistics.host_figures(tensor)
        assert figures == (3.0, 3.0 if count == 1 else 1.0, (count + 2) / count, math.sqrt(count + 8))
        tensor[place] = math.nan
        assert host_statistics.host_figures(tensor) is None


@pytest.mark.parametrize(
    "view",
    [
        lambda heads: heads.transpose(1, 2),
        lambda heads: heads.permute(3, 1, 0, 2),
        lambda heads: heads[..., ::2],
        lambda heads: heads[:, 1:].transpose(1, 2)[..., 3:],
        lambda heads: heads[:, :1].expand(2, 9, 4, 6),
    ],
)
def test_the_kernel_reads_views_as_they_are(view: Any) -> None:
    values = view(torch.randn(2, 5, 4, 6, generator=torch.Generator().manual_seed(0)))
    figures, wide = host_statistics.host_figures(values), values.double()
    assert figures is not None
    assert (figures.max, figures.min) == (wide.max().item(), wide.min().item())
    assert (figures.mean, figures.norm) == pytest.approx((wide.mean().item(), wide.norm().item()), rel=1e-5)


def test_without_a_compiler_the_summary_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp_library.why_not.cache_clear()
    cpp_library.load.cache_clear()
    try:
        tool = PrecisionDebugger(dump_path=tmp_path, quiet=True)
        with tool.start():
            torch.ones(3) * 2
    finally:
        cpp_library.why_not.cache_clear()
        cpp_library.load.cache_clear()
    assert records(tmp_path)["Tensor.__mul__.0.forward"]["output"][0]["Mean"] == 2.0
    assert "statistics on the host are slow" in str(tool.summary)
    assert "no-such-compiler" in str(tool.summary)


def test_integers_booleans_complex_and_empty_tensors() -> None:
    measured = measure(torch.tensor([2**60, -3]))
    assert (measured.max, measured.min, measured.mean, measured.norm) == (2**60, -3, None, None)
    assert (measure(torch.tensor([True, False])).max, measure(torch.tensor([False])).max) == (True, False)
    assert measure(torch.tensor([3 + 4j])).norm == 5.0
    assert measure(torch.empty(0, 3)).max is None
    assert measure(torch.tensor(7.5)).mean == 7.5
    assert measure(torch.empty(3, device="meta")).max is None


@pytest.mark.parametrize("host", [True, False])
def test_nan_and_infinity_are_counted(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not host:
        monkeypatch.setattr(known_tensors, "HOST_DEVICES", ())
    measured = measure(torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.inf]))
    assert (measured.nan_count, measured.inf_count) == (1, 3)
    assert measure(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).nan_count == 0


def test_nan_and_infinity_are_strict_json(tmp_path: Path) -> None:
    tool = PrecisionDebugger(dump_path=tmp_path, quiet=True)
    with tool.start():
        torch.tensor([1.0, -1.0]) / 0
        torch.tensor([0.0]) / 0
        torch.ones(2).masked_fill(torch.tensor([True, False]), -math.inf)
    data = records(tmp_path)
    infinite = data["Tensor.__truediv__.0.forward"]["output"][0]
    assert (infinite["Max"], infinite["Min"], infinite["inf_count"]) == (math.inf, -math.inf, 2)
    assert data["Tensor.__truediv__.1.forward"]["output"][0]["Max"] is None
    assert data["Tensor.__truediv__.1.forward"]["output"][0]["nan_count"] == 1
    assert data["Tensor.masked_fill.0.forward"]["input_args"][2]["value"] == -math.inf
    assert "tensors hold NaN or infinity" in str(tool.summary)


def test_checksum_is_the_crc32_of_the_bytes() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for each in (tensor, tensor.t(), tensor.bfloat16(), tensor[1:, ::2], tensor.bool()):
        expected = f"{zlib.crc32(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes()):08x}"
        assert measure(each, checksum=True).crc == expected


def test_an_unchanged_tensor_is_measured_once_and_a_changed_one_again() -> None:
    batch = StatisticsBatch()
    tensor = torch.randn(4, 6)
    first = batch.measure(tensor)
    assert batch.measure(tensor.t()) is first
    assert batch.measure(tensor.view(2, 12)) is first
    assert batch.measure(tensor[:2]) is not first
    assert batch.measure(tensor.expand(3, 4, 6)) is not first
    tensor.add_(1)
    assert batch.measure(tensor) is not first


def test_a_weight_is_remembered_across_steps_unless_written_to() -> None:
    batch = StatisticsBatch()
    weight = torch.nn.Parameter(torch.zeros(100))
    first = batch.measure(weight)
    batch.flush()
    assert batch.measure(weight) is first
    batch.flush()
    # what no version counter sees
    weight.data.fill_(3)
    batch.measure(weight)
    again = batch.measure(weight)
    batch.flush()
    assert again.max == 3.0
    activation = torch.zeros(100)
    before = batch.measure(activation)
    batch.flush()
    assert batch.measure(activation) is not before


class CountReads(TorchDispatchMode):
    """Counts the operators that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.reads += "_local_scalar_dense" in name or "equal.default" in name or "nonzero" in name
        return func(*args, **(kwargs or {}))


def test_a_step_reads_back_from_a_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the host is treated as a device: then every read of an element would be a wait
    monkeypatch.setattr(known_tensors, "HOST_DEVICES", ())
    transfers = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *args, **kwargs: (
            (transfers.append(args) if args == ("cpu",) else None) or to(tensor, *args, **kwargs)
        ),
    )
    tool, model = PrecisionDebugger(dump_path=tmp_path, quiet=True, level="mix"), Net()
    for _ in range(2):
        with CountReads() as count, tool.start(model):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        tool.step()
        assert count.reads == 0
        assert len(transfers) == 1
        transfers.clear()
    assert records(tmp_path, 1)["Module.head.Linear.forward.0"]["output"][0]["Norm"] is not None
