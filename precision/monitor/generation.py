"""What a generation step says beyond its activations: certainty of the logits, size of the KV cache, speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Iterator

import torch
from torch import Tensor

from precision.monitor.collector import Collector


def add_generation(collector: Collector, result: Any) -> None:
    """Measure a model's result: {"logits.entropy", "logits.margin"} over the rows' last tokens, "kv.<layer>.<key or
    value>.norm" for a KV cache in the result.

    Args:
        collector: takes the figures.
        result: a mapping or object with logits (batch, sequence, vocabulary) and past_key_values; anything it doesn't
            have is left out.
    """
    logits = _field(result, "logits")
    if isinstance(result, Tensor):
        logits = result
    if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.is_floating_point():
        collector.add_values("generation", ["logits.entropy", "logits.margin"], certainty(logits))
    layers = list(cache_layers(_field(result, "past_key_values")))
    if layers:
        names = [f"kv.{layer}.{side}.norm" for layer in range(len(layers)) for side in ("key", "value")]
        # a bfloat16 cache's norm in bfloat16 would keep three digits
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for pair in layers for tensor in pair]
        collector.add_values("generation", names, torch.stack(norms))


def certainty(logits: Tensor) -> Tensor:
    """(batch, ..., vocabulary) to (2,): entropy in nats and margin between the first two logits, means of the rows."""
    last = logits.detach()
    while last.dim() > 2:
        last = last[:, -1]
    last = last.float()
    entropy = torch.special.entr(last.softmax(-1)).sum(-1).mean()
    best = last.topk(2).values
    return torch.stack([entropy, (best[:, 0] - best[:, 1]).mean()])


def cache_layers(cache: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Key and value of each layer: of tuples, and of objects that keep two lists, whatever they call them."""
    if isinstance(cache, (tuple, list)):
        for pair in cache:
            if isinstance(pair, (tuple, list)) and len(pair) >= 2 and isinstance(pair[0], Tensor):
                yield pair[0], pair[1]
        return
    for key_name, value_name in (("key_cache", "value_cache"), ("keys", "values")):
        keys, values = getattr(cache, key_name, None), getattr(cache, value_name, None)
        if isinstance(keys, (list, tuple)) and isinstance(values, (list, tuple)):
            yield from zip(keys, values)
            return


def tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens a call processes: the elements of input_ids, or of the first integer tensor; 0 for none."""
    candidates = [kwargs.get("input_ids"), *args, *kwargs.values()]
    for entry in candidates:
        if isinstance(entry, Tensor) and not entry.is_floating_point() and entry.dim() == 2:
            return entry.numel()
    return 0


def loss_in(result: Any) -> Tensor | None:
    """The loss of a model's result, where it has one."""
    loss = _field(result, "loss")
    return loss.detach().reshape(1) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _field(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
