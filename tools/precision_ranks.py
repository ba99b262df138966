"""One process against several ranks that hold the model together: the ranks' dump, and how its parts are put together.

python -m torch.distributed.run --standalone --nproc-per-node=N precision_ranks.py JOB.pt
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from precision.compare.mapping import Rule

TIMEOUT_S = 3600


def dump_ranks(
    model_path: Path, dtype: str, ranks: int, ids: Tensor, following: Tensor, folder: Path, job: Path
) -> None:
    """Dump a prefill and decode steps of the model divided among `ranks` processes on this machine's CPU.

    Args:
        ids, following: as for precision_checks.dump_tuned.
        folder: of the dump.
        job: a file that the ranks read their task from.

    Raises:
        UserError: when the ranks fail, with the reason that they give.
    """
    from npu_tuned_model import UserError

    torch.save(
        {"model_path": str(model_path), "dtype": dtype, "ids": ids, "following": following, "folder": str(folder)}, job
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks))}
    done = subprocess.run(
        [*command, str(Path(__file__).resolve()), str(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if "Error: " in line and "ChildFailedError" not in line]
        reason = reasons[0].partition("Error: ")[2] if reasons else f"status {done.returncode}"
        raise UserError(f"the {ranks} ranks could not run: {reason}")


def rank_rules(config: Any, ranks: int) -> list[Rule]:
    """How the ranks' parts of the fused layers are put together; everything else shows by its shape."""
    head_dim = config.hidden_size // config.num_attention_heads
    q, kv = config.hidden_size // ranks, config.num_key_value_heads * head_dim // ranks
    layer = "model.layers.{n}"
    fused = {
        f"{layer}.self_attn.qkv": [q, kv, kv],
        f"{layer}.mlp.gate_up_proj": [config.intermediate_size // ranks] * 2,
    }
    return [Rule(golden=path, target=path, sections=sections) for path, sections in fused.items()]


def main(job: Path) -> None:
    """What one rank does."""
    import precision_checks
    import torch.distributed as dist

    from npu_tuned_model import load_model
    from npu_tuned_model.tensor_parallel import TensorParallel

    work = torch.load(job, weights_only=True)
    dist.init_process_group("gloo")
    try:
        parallel = TensorParallel.of_process_group()
        model = load_model(work["model_path"], device="cpu", dtype=work["dtype"], parallel=parallel)
        precision_checks.dump_tuned(model, work["ids"], work["following"], Path(work["folder"]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
