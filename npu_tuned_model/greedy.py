"""Greedy search with little work on the host between the steps.

transformers' own loop is written for every model and option: for each token it copies the whole text, rebuilds the
model's arguments and starts about fifteen small operators. This one does what plain greedy search needs, and leaves
every other request to transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The arguments of greedy_search() that greedy_tokens() knows, and those it may leave aside when they ask for nothing.
_KNOWN = {
    "logits_processor",
    "stopping_criteria",
    "pad_token_id",
    "eos_token_id",
    "streamer",
    "attention_mask",
    "past_key_values",
    "use_cache",
}
_FURTHER = {"output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate", "synced_gpus"}


def is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether greedy_search(**kwargs) asks for tokens only, with a KV cache, and for nothing else."""
    return (
        kwargs.keys() <= _KNOWN | _FURTHER
        and not any(kwargs.get(name) for name in _FURTHER)
        and kwargs.get("past_key_values") is not None
        and (kwargs.get("eos_token_id") is None or kwargs.get("pad_token_id") is not None)
    )


@torch.no_grad()
def greedy_tokens(
    model: Any,
    input_ids: Tensor,
    *,
    past_key_values: Any,
    stopping_criteria: Any,
    logits_processor: Any = (),
    attention_mask: Tensor | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: Any = None,
    streamer: Any = None,
    **_: Any,
) -> Tensor:
    """The most likely token after each text, again and again; the meaning is that of transformers' greedy_search().

    Args:
        model: called once per token, with the prompts first and then with one token per row.
        input_ids: (batch, sequence) int64 prompts.
        past_key_values: an empty KV cache.
        logits_processor: called with the texts so far and their last tokens' scores, gives the scores to go by.
        stopping_criteria: its max_length says how long a text can get.
        eos_token_id, pad_token_id: a row that reached the one is filled with the other.

    Returns:
        (batch, length) int64, the prompts and what follows.
    """
    batch, length = input_ids.shape
    texts = input_ids.new_empty(batch, max(stopping_criteria.max_length, length + 1))
    texts[:, :length] = input_ids
    ends = None if eos_token_id is None else torch.tensor(eos_token_id, device=input_ids.device).reshape(-1)
    unfinished = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
    step = input_ids
    while True:
        output = model(input_ids=step, attention_mask=attention_mask, past_key_values=past_key_values, return_dict=True)
        scores = output.logits[:, -1]
        if logits_processor:
            scores = logits_processor(texts[:, :length], scores)
        tokens = scores.argmax(dim=-1)
        if ends is not None:
            tokens = torch.where(unfinished, tokens, pad_token_id)
            unfinished = unfinished & (tokens[:, None] != ends).all(dim=1)
        step, attention_mask = tokens[:, None], None
        texts[:, length] = tokens
        length += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        if ends is not None and not unfinished.any():
            break
        if stopping_criteria(texts[:, :length], None):
            break
    if streamer is not None:
        streamer.end()
    return texts[:, :length]
