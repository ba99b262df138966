"""A script that two ranks run together: every case's tokens and sizes, as one rank of two sees them.

python -m torch.distributed.run --standalone --nproc-per-node=2 two_ranks.py CASES.json OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import padded_batch
from torch import Tensor

from npu_tuned_model import Qwen2ForCausalLM, TuningOptions, UserError, load_model
from npu_tuned_model.tensor_parallel import TensorParallel

LENGTHS = [9, 4, 1]


def generate(model: Qwen2ForCausalLM, tokens: int, *, sample: bool = False) -> Tensor:
    ids, mask = padded_batch(LENGTHS)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=sample, pad_token_id=0
    )[:, max(LENGTHS) :]


def held_elements(model: Qwen2ForCausalLM) -> int:
    """Elements of the weights that are divided: all but the norms."""
    return sum(weight.numel() for name, weight in model.named_parameters() if "norm" not in name)


def first_logits(model: Qwen2ForCausalLM) -> Tensor:
    ids, mask = padded_batch(LENGTHS)
    return model(ids, attention_mask=mask).logits[:, -1]


def refusal(model: Qwen2ForCausalLM, folder: Path) -> str:
    try:
        model.save_pretrained(folder)
    except UserError as error:
        return str(error)
    return ""


def main(cases: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    parallel = TensorParallel.of_process_group()
    results = {}
    for name, case in json.loads(cases.read_text()).items():
        options = TuningOptions() if case["options"] == "all" else TuningOptions.none()
        model = load_model(
            case["folder"],
            device="cpu",
            dtype="float32",
            options=options,
            parallel=parallel,
            weight_dtype=case["weight_dtype"],
        )
        if case["graph"]:
            model.run_graph()
        results[name] = {
            "tokens": generate(model, case["tokens"]),
            "sampled": generate(model, 16, sample=True),
            "logits": first_logits(model),
            "held": held_elements(model),
            "saving": refusal(model, out / "saved"),
        }
    torch.save(results, out / f"rank{parallel.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
