"""The simulated device: the CPU's bits, memory, streams, threads; and nothing goes past it unseen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.t(),
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "copy of a view": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(-1),
    "mask": lambda x: x[x > 0],
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "cat": lambda x: torch.cat([x, x[:1]]),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "sort": lambda x: x.sort(dim=0).values,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
    "factories": lambda x: torch.arange(3, device=x.device) + torch.zeros(3, device=x.device) + x.new_ones(3),
    "drawn": lambda x: torch.randn(3, 4, device=x.device) + torch.rand_like(x),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(0.5, device=x.device)),
}
WRITTEN: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "a column": lambda x: x[:, 1].mul_(2),
    "fill": lambda x: x[0].fill_(7),
    "copy_": lambda x: x.copy_(torch.ones(4)),
    "index_put_": lambda x: x.index_put_((torch.tensor([1], device=x.device),), torch.ones(1, 4, device=x.device)),
    "zero_": lambda x: x.zero_(),
    "transposed": lambda x: x.t().copy_(x.clone().t() * 2),
}


def both() -> tuple[Tensor, Tensor]:
    host = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return host, host.npu()


@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_the_cpus_bits(name: str) -> None:
    host, device = both()
    torch.manual_seed(1)
    expected = COMPUTED[name](host)
    torch.manual_seed(1)
    result = COMPUTED[name](device)
    assert result.device == torch.device("npu", 0)
    assert (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_go_to_the_tensor_and_its_views(name: str) -> None:
    host, device = both()
    view = device.t()
    WRITTEN[name](host)
    result = WRITTEN[name](device)
    assert torch.equal(device.cpu(), host)
    assert torch.equal(view.cpu(), host.t())
    if name in ("add_", "copy_", "zero_"):
        assert result is device


def test_host_and_device_exchange_data() -> None:
    host, device = both()
    assert torch.equal(device.cpu(), host)
    assert device.tolist() == host.tolist()
    assert device[1, 2].item() == host[1, 2].item()
    assert torch.equal(host.to("npu", torch.float16).cpu(), host.half())
    assert torch.equal(device.to("cpu", torch.bfloat16), host.bfloat16())
    back = torch.empty(3, 4)
    back.copy_(device, non_blocking=True)
    assert torch.equal(back, host)


def test_a_tensor_can_be_printed() -> None:
    host, device = both()
    assert repr(device) == f"{repr(host)[:-1]}, device='npu:0')"


def test_two_devices() -> None:
    host, first = both()
    second = first.to("npu:1")
    assert second.device == torch.device("npu", 1)
    assert (second + 1).device == torch.device("npu", 1)
    assert torch.equal((second + 1).to("npu:0").cpu(), host + 1)
    with torch.npu.device(1):
        assert torch.ones(1, device="npu").device == torch.device("npu", 1)
    assert torch.npu.device_count() == 2


def test_streams_events_and_synchronisation() -> None:
    host, device = both()
    stream, start, end = torch.npu.Stream(), torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    with torch.npu.stream(stream):
        result = device + 1
    stream.synchronize()
    torch.npu.current_stream().wait_stream(stream)
    end.record()
    torch.npu.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert torch.equal(result.cpu(), host + 1)


def test_memory_figures_follow_allocations() -> None:
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    block = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() - before >= 4 << 20
    del block
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before >= 4 << 20
    free, total = torch.npu.mem_get_info()
    assert 0 < free < total


def test_every_thread_computes() -> None:
    host, device = both()

    class Worker(threading.Thread):
        def run(self) -> None:
            self.result = (device + 1).cpu()

    worker = Worker()
    worker.start()
    worker.join()
    assert torch.equal(worker.result, host + 1)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda factor: (device * factor).cpu(), range(4)))
    assert all(torch.equal(result, host * factor) for factor, result in enumerate(results))


def test_what_slips_past_the_simulation_is_an_error() -> None:
    _, device = both()
    with _disable_current_modes(), pytest.raises(RuntimeError):
        device + 1


def test_a_generator_of_the_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="pass generator=None"):
        torch.randn(2, device="npu", generator=torch.Generator("npu"))


@pytest.fixture
def internal_formats() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.usefixtures("internal_formats")
def test_the_npus_own_format_is_kept_and_changes_no_value() -> None:
    host = torch.randn(40, 24)
    tiled = torch_npu.npu_format_cast(host.npu(), 29)
    assert torch_npu.get_npu_format(tiled) == 29
    assert torch_npu.get_npu_format(torch.nn.Parameter(tiled, requires_grad=False)) == 29
    assert torch.equal(tiled.cpu(), host)
    assert torch.equal(torch.mm(host.t().npu(), tiled).cpu(), host.t() @ host)
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(tiled, 2)) == 2
