"""Joining the ranks that the deepspeed launcher has started, and the fastest sum over them that the device has.

DeepSpeed starts the processes, joins them and sums their results. It does not cut the model (init_inference, AutoTP):
that wants the whole model in the memory of every rank first, takes a share of its own where widths don't divide by its
grain, and cuts layers called gate_up_proj by a rule of their own. Here every rank reads its part of the files.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmark.ranks import Ranks
from npu_tuned_model.deterministic import make_deterministic
from npu_tuned_model.device import resolve_device
from npu_tuned_model.errors import UserError
from npu_tuned_model.npu_setup import NpuSetup, PreparedSetup, set_up
from npu_tuned_model.tensor_parallel import TensorParallel, sum_over_ranks

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_LAUNCH = "start it with the launcher: deepspeed --num_gpus=N benchmark/deepspeed/benchmark_qwen.py ..."


@contextlib.contextmanager
def errors_of_rank() -> Iterator[None]:
    """Say of which rank an error is, where it isn't the first: the launcher shows all of them."""
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            raise
        raise UserError(f"rank {rank}: {error}") from error


def local_place() -> tuple[int, int]:
    """(rank on this machine, ranks on this machine), as the launcher says.

    Raises:
        UserError: when no launcher has started this process.
    """
    try:
        rank, _ = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        # deepspeed says LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE
        size = int(os.environ.get("LOCAL_SIZE") or os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UserError(f"this process was not started as one of several ranks ({error}): {_LAUNCH}") from error
    return rank, size


def share_cores(ranks_here: int) -> None:
    """Give each rank of this machine its share of the cores' threads, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(cores // ranks_here, 1))


def join(
    device: str, setup: NpuSetup, timeout_s: float, *, graph: bool, deterministic: bool = False
) -> tuple[Ranks, str, PreparedSetup]:
    """Set this process up and join the other ranks.

    Args:
        device: "auto", "cpu", "cuda" or "npu".
        setup: cores and HCCL's variables are settled before the ranks meet.
        graph: whether the model runs as graphs. On a CPU they sum through gloo: ranks that had DeepSpeed's operator in
            a graph were seen waiting for each other for minutes.
        deterministic: tell torch and the device's libraries, which read it when they start, to be deterministic.
        timeout_s: after which a sum over the ranks that one of them doesn't answer ends this process with an error.

    Returns:
        the place among the ranks, the name of this rank's device, and what of `setup` is done.

    Raises:
        UserError: no launcher, no such device, or DeepSpeed is not installed.
    """
    local_rank, ranks_here = local_place()
    kind = resolve_device(device).type
    name = kind if kind == "cpu" else f"{kind}:{local_rank}"
    if kind == "npu":
        _prepare_npu(local_rank)
    elif kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        share_cores(ranks_here)
    ranks = int(os.environ["WORLD_SIZE"])
    if deterministic:
        make_deterministic(torch.device(name))
    process = set_up(setup, torch.device(name), local_rank=local_rank, local_ranks=ranks_here, ranks=ranks)
    os.environ.setdefault("DS_ACCELERATOR", kind)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(f"DeepSpeed can't be imported ({error}): pip install 'npu-tuned-qwen2[deepspeed]'") from error
    deepspeed.init_distributed(dist_backend=_BACKENDS[kind], timeout=datetime.timedelta(seconds=timeout_s))
    if torch.distributed.get_world_size() == 1:
        return Ranks(), name, process
    all_reduce, how = sum_over_ranks, _BACKENDS[kind]
    if kind == "cpu" and not graph and _has_shared_memory_sum(deepspeed, ranks_here):
        all_reduce, how = _shared_memory_sum, "DeepSpeed's sum in shared memory"
    return Ranks(TensorParallel.of_process_group(all_reduce), how), name, process


def _prepare_npu(local_rank: int) -> None:
    import torch_npu

    torch_npu.npu.set_device(local_rank)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 3):
        # Before anything has looked up the collectives: old torch can't put them into a graph by itself.
        import torchair

        torchair.patch_for_hcom()


def _has_shared_memory_sum(deepspeed: Any, ranks_here: int) -> bool:
    # Without these conditions the operator crashes or leaves the ranks waiting for each other.
    if torch.distributed.get_world_size() != ranks_here or os.environ.get("LOCAL_SIZE") != str(ranks_here):
        return False
    level = getattr(deepspeed.comm.comm.cdb, "shm_vector_kernel_level", 0)
    return hasattr(torch.ops.deepspeed, "inference_all_reduce_") and level >= 2


def _shared_memory_sum(tensor: Tensor) -> Tensor:
    return torch.ops.deepspeed.inference_all_reduce_(tensor)
