"""The processes that run one model together: which one this is, what they share, and what that costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.compare_reports import read_report
from benchmark.metrics import Spread
from npu_tuned_model.checkpoint_layout import WHOLE, Shard
from npu_tuned_model.device import synchronize
from npu_tuned_model.errors import UserError
from npu_tuned_model.tensor_parallel import TensorParallel
from npu_tuned_model.work import Work

_REPEATS = 20


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes that run one model; by default it runs it alone.

    Attributes:
        parallel: what the model is divided by; None for one process.
        how: the collective in words.
        single: figures of the same workload on one rank (see `read_single`), for the linearity.
    """

    parallel: TensorParallel | None = None
    how: str = ""
    single: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        return 1 if self.parallel is None else self.parallel.size

    @property
    def shard(self) -> Shard:
        return WHOLE if self.parallel is None else self.parallel.shard

    @contextlib.contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """The block runs in rank 0, then in the others: what it makes is made once."""
        if self.shard.rank > 0:
            dist.barrier()
        yield
        if self.size > 1 and self.shard.rank == 0:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """One value per rank, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def read_single(path: Path) -> dict[str, Any]:
    """The report.json of a run on one rank.

    Raises:
        UserError: when it is no such report.
    """
    report = read_report(path)
    if report["tensor_parallel"] is not None:
        raise UserError(f"{path} is of a run on {report['tensor_parallel']['ranks']} ranks; give one of a single rank")
    return report


def parallel_report(
    ranks: Ranks, report: dict[str, Any], hidden_size: int, work: Work, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Memory of each rank, what the sums over the ranks cost, and the linearity. Every rank calls it.

    The all-reduce is timed alone, with the tensors of the two steps; in the model it may be slower, where ranks wait
    for each other, or overlap with other work.
    """
    tuned = report["variants"]["tuned"]["summary"]
    batch, length = report["workload"]["batch_size"], report["workload"]["input_max_len_tokens"]
    result: dict[str, Any] = {
        "ranks": ranks.size,
        "all_reduce": ranks.how,
        "peak_bytes_per_rank": ranks.gather(report["memory"]["tuned_peak_bytes"]),
        "weight_bytes_per_rank": ranks.gather(work.weight_bytes),
    }
    for step, tokens in (("prefill", batch * length), ("decode", batch)):
        times = _time_all_reduce(ranks, tokens, hidden_size, device, dtype)
        step_ms = tuned[f"{step}_ms"]["median"] if f"{step}_ms" in tuned else None
        result[step] = {
            "bytes": tokens * hidden_size * dtype.itemsize,
            "count": work.sums_per_step,
            "all_reduce_ms": times,
            "share": None if step_ms is None else work.sums_per_step * times["median"] / step_ms,
        }
    result["linearity"] = None if ranks.single is None else _linearity(report, ranks.single, ranks.size)
    return result


def _time_all_reduce(
    ranks: Ranks, tokens: int, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    assert ranks.parallel is not None
    tensor = torch.zeros(tokens, hidden_size, dtype=dtype, device=device)
    times = []
    for _ in range(_REPEATS + 2):
        synchronize(device)
        start = time.perf_counter()
        tensor = ranks.parallel.all_reduce(tensor)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1000)
    return Spread.of(times[2:]).as_dict()


def check_single(single: dict[str, Any], model: dict[str, Any], workload: dict[str, Any]) -> None:
    """Raise UserError where a run on one rank was not of this model and workload."""
    for part, mine in (("model", model), ("workload", workload)):
        for key, value in mine.items():
            if key != "path" and single[part].get(key) != value:
                raise UserError(
                    f"--single_report is of another {part}: {key} {single[part].get(key)!r} there, {value!r} here; "
                    "measure one rank with the same options"
                )


def _linearity(report: dict[str, Any], single: dict[str, Any], size: int) -> dict[str, float]:
    """Throughput over N ranks / (N * throughput of one), by step."""
    ours, theirs = report["variants"]["tuned"]["summary"], single["variants"]["tuned"]["summary"]
    result = {}
    for step in ("prefill", "decode"):
        if f"{step}_ms" in ours and f"{step}_ms" in theirs:
            result[step] = theirs[f"{step}_ms"]["median"] / ours[f"{step}_ms"]["median"] / size
    result["whole generation"] = ours["tokens_per_s"]["median"] / theirs["tokens_per_s"]["median"] / size
    return result
