"""A script that two ranks run together: watched training, and what each figure must be, as this rank sees it.

python -m torch.distributed.run --standalone --nproc-per-node=2 monitor_two_ranks.py CASE OUT
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from monitor_runs import Net, batches, loss_of

from precision.monitor import Monitor

STEPS, PASSES = 3, 2
NAN_STEP = 1
# weights beyond what is copied before it is measured
WIDTH = 96
OPTIONS: dict[str, Any] = {
    "all_xy": True,
    "xy_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "page": False,
    "quiet": True,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}]},
}


def rank_inputs(passes: int) -> list[Tensor]:
    return batches(2 * STEPS * passes, width=WIDTH)[dist.get_rank() :: 2]


def expected(model: nn.Module, inputs: list[Tensor], passes: int) -> dict[str, Tensor]:
    """Tensors by "<kind>/<name>/<step>", computed without a wrapper: gradients are averaged by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = {}
    for step in range(STEPS):
        for place in range(passes):
            (loss_of(model(inputs[step * passes + place])) / passes).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            result[f"grad_unreduced/{name}/{step}"] = parameter.grad.clone()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            result[f"grad_reduced/{name}/{step}"] = parameter.grad.clone()
        optimizer.step()
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                result[f"{key}/{name}/{step}"] = optimizer.state[parameter][key].clone()
        optimizer.zero_grad()
    return result


def distributed_data_parallel(out: Path, buckets: bool) -> None:
    model = Net(WIDTH)
    inputs = rank_inputs(PASSES)
    tensors = expected(copy.deepcopy(model), inputs, PASSES)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=buckets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(output_dir=out, **OPTIONS).watch(wrapped, optimizer, grad_acc_steps=PASSES) as monitor:
        for number, batch in enumerate(inputs):
            last = number % PASSES == PASSES - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (loss_of(wrapped(batch)) / PASSES).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not buckets)
    assert monitor.folder is not None
    torch.save({"folder": str(monitor.folder), "tensors": tensors}, out / f"rank{dist.get_rank()}.pt")


def nan_on_one_rank(out: Path) -> None:
    model = Net(WIDTH)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(output_dir=out, **OPTIONS).watch(wrapped, optimizer):
        for step, batch in enumerate(rank_inputs(1)):
            handle = None
            if step == NAN_STEP and dist.get_rank() == 1:
                handle = model.branches.left.register_forward_hook(
                    lambda module, args, result: result * float("nan"), prepend=True
                )
            loss_of(wrapped(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.remove()


def some_ranks(out: Path) -> None:
    model = Net(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with Monitor(output_dir=out, module_ranks="1", **OPTIONS).watch(wrapped, optimizer):
        for batch in rank_inputs(1):
            loss_of(wrapped(batch)).backward()
            optimizer.step()


def deepspeed_engine(out: Path, stage: int) -> None:
    import deepspeed

    model = Net(WIDTH)
    inputs = rank_inputs(1)
    tensors = expected(copy.deepcopy(model), inputs, 1)
    config = {
        "train_micro_batch_size_per_gpu": inputs[0].shape[0],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with Monitor(output_dir=out, **OPTIONS).watch(engine, engine.optimizer) as monitor:
        for batch in inputs:
            engine.backward(loss_of(engine(batch)))
            engine.step()
    assert monitor.folder is not None
    torch.save({"folder": str(monitor.folder), "tensors": tensors}, out / f"rank{dist.get_rank()}.pt")


def main(case: str, out: Path) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    cases: dict[str, Any] = {
        "ddp": lambda: distributed_data_parallel(out, False),
        "ddp_buckets": lambda: distributed_data_parallel(out, True),
        "nan": lambda: nan_on_one_rank(out),
        "ranks": lambda: some_ranks(out),
        "deepspeed0": lambda: deepspeed_engine(out, 0),
        "deepspeed1": lambda: deepspeed_engine(out, 1),
        "deepspeed2": lambda: deepspeed_engine(out, 2),
    }
    for name in case.split(","):
        folder = out / name
        folder.mkdir(exist_ok=True)
        out, parent = folder, out
        cases[name]()
        out = parent
        dist.barrier()
    # a wrapped model in a reference cycle keeps gloo's threads alive, and one that lets go of a tensor while Python
    # shuts down ends the process with an abort
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
