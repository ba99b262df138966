"""How many planted kernel faults free-benchmark finds in a real model, and how many healthy operators it flags.

    python tests/precision/measure_faults.py --model_path DIR [--tokens 48]

Each call of an operator is one trial: it is judged as computed by the faulty kernel, while the model goes on with the
right result. Some are as good as right (what does not overflow needs no maximum); they count all the same.
"""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import click
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from precision import PrecisionDebugger
from precision.free_benchmark.checker import Checker
from precision.free_benchmark.config import PERT_MODES

TEXT = Path(__file__).resolve().parents[2] / "README.md"
# columns that a kernel sums before it rounds to bfloat16
K_BLOCK = 16

right_attention, right_linear = F.scaled_dot_product_attention, F.linear


def _mask(query: Tensor, mask: Tensor | None) -> Tensor:
    tokens = query.shape[-2]
    return (
        torch.full((tokens, tokens), torch.finfo(query.dtype).min, dtype=query.dtype).triu(1) if mask is None else mask
    )


def attention_without_maximum(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = (query @ key.mT / query.shape[-1] ** 0.5 + mask).half().exp()
    return (scores / scores.sum(-1, keepdim=True)).to(value.dtype) @ value


def attention_in_low_precision(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    weights = (query @ key.mT / query.shape[-1] ** 0.5 + mask).softmax(-1)
    total = torch.zeros_like(value)
    for place in range(weights.shape[-1]):
        total = total + weights[..., place : place + 1] * value[..., place : place + 1, :]
    return total


def linear_in_low_precision(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    blocks = zip(x.split(K_BLOCK, -1), weight.split(K_BLOCK, -1))
    total = sum((right_linear(*block) for block in blocks), start=torch.zeros((), dtype=x.dtype))
    return total if bias is None else total + bias


def first_chunk_wrong(result: Tensor) -> Tensor:
    result = result.clone(memory_format=torch.contiguous_format)
    result.view(-1)[:64] = 0.5
    return result


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "scale off by 1 %": lambda q, k, v, mask: right_attention(q, k, v, attn_mask=mask) * 1.01,
    "wrong first chunk": lambda q, k, v, mask: first_chunk_wrong(right_attention(q, k, v, attn_mask=mask)),
    "transposed mask": lambda q, k, v, mask: right_attention(q, k, v, attn_mask=mask.mT),
    "without the maximum": attention_without_maximum,
    "low-precision accumulation": attention_in_low_precision,
}
LINEAR: dict[str, Callable[..., Tensor]] = {
    "scale off by 1 %": lambda *args: right_linear(*args) * 1.01,
    "wrong first chunk": lambda *args: first_chunk_wrong(right_linear(*args)),
    "low-precision accumulation": linear_in_low_precision,
}


class Trial:
    """Runs a model in which one operator is faulty wherever the check looks at it."""

    def __init__(self, name: str, fault: Callable[..., Tensor]) -> None:
        self.name, self._fault = name, fault

    def faulty(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator as free-benchmark sees it: faulty in bfloat16, right in the precision it is compared with."""
        if args[0].dtype != torch.bfloat16:
            return self._right(*args, **kwargs)
        if self.name == "linear":
            return self._fault(*args, **kwargs)
        return self._fault(*args[:3], _mask(args[0], kwargs.get("attn_mask")))

    def rows(self, model: torch.nn.Module, ids: Tensor) -> list[dict[str, str]]:
        """What the check says of every call."""
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        call = Checker.call

        def judged(checker: Checker, api: Any, function: Any, args: Any, kwargs: Any) -> Any:
            call(checker, api, function, args, kwargs)
            return self._right(*args, **kwargs) if api.key == f"NPU.{self.name}" else function(*args, **kwargs)

        try:
            with mock.patch.object(F, self.name, self.faulty), mock.patch.object(Checker, "call", judged):
                tool = PrecisionDebugger(
                    dump_path=folder, task="free_benchmark", quiet=True, list=[f"NPU.{self.name}"], extra_info=False
                )
                tool.register_api(F, [self.name])
                with tool.start(model):
                    model(ids)
            with open(folder / "step0/rank/free_benchmark_calls.csv") as file:
                return list(csv.DictReader(file))
        finally:
            shutil.rmtree(folder)

    def _right(self, *args: Any, **kwargs: Any) -> Tensor:
        return (right_linear if self.name == "linear" else right_attention)(*args, **kwargs)


def healthy(model: torch.nn.Module, ids: Tensor, mode: str) -> Any:
    """The summary of a check of the model as it is."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        tool = PrecisionDebugger(dump_path=folder, task="free_benchmark", quiet=True, pert_mode=mode)
        with tool.start(model):
            model(ids)
        return tool.summary
    finally:
        shutil.rmtree(folder)


@click.command()
@click.option("--model_path", required=True)
@click.option("--tokens", default=48)
@click.option("--threads", default=1)
@torch.no_grad()
def main(model_path: str, tokens: int, threads: int) -> None:
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    torch.set_num_threads(threads)
    text = TEXT.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(model_path)(text, return_tensors="pt").input_ids[:, :tokens]
    model = Qwen2ForCausalLM.from_pretrained(model_path, torch_dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    planted = found = 0
    for name, faults in (("scaled_dot_product_attention", ATTENTION), ("linear", LINEAR)):
        for fault, kernel in faults.items():
            trial = Trial(name, kernel)
            verdicts = Counter(row["verdict"] for row in trial.rows(model, ids))
            planted += verdicts.total()
            found += verdicts["wrong kernel"]
            click.echo(f"{name:30}{fault:30}{dict(verdicts)}")
    click.echo(f"found {found} of {planted} ({found / planted:.1%})")
    model = Qwen2ForCausalLM.from_pretrained(model_path, torch_dtype=torch.bfloat16, attn_implementation="eager").eval()
    for mode in PERT_MODES:
        summary = healthy(model, ids, mode)
        flagged = sum(summary.flagged.values())
        click.echo(f"healthy, {mode:20}flagged {flagged} of {summary.checked} ({flagged / summary.checked:.2%})")


if __name__ == "__main__":
    main()
