"""One generation of a benchmark: greedy and of a fixed length, with any model that has transformers' generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import QWEN2_ATTENTION_CLASSES

from benchmark.metrics import StepTimer, TokenClock, round_figures
from benchmark.workload import Workload

FIXED_LENGTH = "end of text is suppressed (min_new_tokens = max_new_tokens), so every row gets exactly max_new_tokens"


class Subject:
    """A model under measurement; `use()` is called before each of its turns."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model

    def use(self) -> None:
        """The tuned model needs no switching."""


class StockSubject(Subject):
    """transformers' own model with one of its attention variants; two subjects share one model's weights."""

    def __init__(self, model: Any, attention: str) -> None:
        super().__init__(f"stock {attention}", model)
        self._attention = attention

    def use(self) -> None:
        """Switch the shared model to this attention."""
        # the variants are subclasses without state of their own, so an instance can change between them
        for layer in self.model.model.layers:
            layer.self_attn.__class__ = QWEN2_ATTENTION_CLASSES[self._attention]
        self.model.model._attn_implementation = self._attention
        self.model.config._attn_implementation = self._attention


def load_stock(folder: Path, *, device: torch.device, dtype: torch.dtype) -> list[Subject]:
    """transformers' Qwen2ForCausalLM on the same checkpoint, with eager and with sdpa attention."""
    model = Qwen2ForCausalLM.from_pretrained(str(folder), torch_dtype=dtype, attn_implementation="eager")
    model = model.to(device).eval()
    return [StockSubject(model, "eager"), StockSubject(model, "sdpa")]


def generate(
    model: Any,
    workload: Workload,
    *,
    device: torch.device,
    streamer: TokenClock | None = None,
    probe: Any = None,
    steps: int | None = None,
) -> Tensor:
    """Greedy tokens for the workload, (batch, new tokens) on the host.

    Args:
        probe: a logits processor that only looks.
        steps: tokens to generate, the workload's max_new_tokens by default.
    """
    tokens = workload.max_new_tokens if steps is None else steps
    pad = getattr(model.config, "pad_token_id", None)
    end = model.generation_config.eos_token_id
    first_end = end[0] if isinstance(end, list) and end else end
    config = GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=pad if pad is not None else first_end,
    )
    with torch.no_grad():
        sequences = model.generate(
            input_ids=workload.input_ids.to(device),
            attention_mask=workload.attention_mask.to(device),
            generation_config=config,
            streamer=streamer,
            logits_processor=LogitsProcessorList([] if probe is None else [probe]),
        )
    new_tokens: Tensor = sequences[:, workload.input_max_len :].cpu()
    if new_tokens.shape[1] != tokens:
        raise RuntimeError(f"{new_tokens.shape[1]} tokens were generated and {tokens} asked for")
    return new_tokens


def timed_generation(subject: Subject, workload: Workload, *, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """One measured generation: its figures (see round_figures) and its tokens."""
    subject.use()
    with StepTimer(subject.model, device) as timer:
        clock = TokenClock()
        tokens = generate(subject.model, workload, device=device, streamer=clock)
    return round_figures(timer, clock, workload.batch_size), tokens
