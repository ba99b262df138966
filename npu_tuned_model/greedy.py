"""Greedy search with little work on the host between the steps.

transformers' own loop is written for every model and option: for each token it copies the whole text, rebuilds the
model's arguments and starts about fifteen small operators, each of which finds its code and data thrown out of the
CPU's caches by the weights. This one does what plain greedy search needs, and leaves every other request to
transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

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
        past_key_values: an empty KV cache (kv_cache.KVCache).
        logits_processor: called with the texts so far and their last tokens' scores, gives the scores to go by.
        stopping_criteria: asked after each token whether to stop, with the texts so far.
        eos_token_id, pad_token_id: a row that reached the one is filled with the other.

    Returns:
        (batch, length) int64, the prompts and what follows.
    """
    texts, length = _Texts(input_ids), input_ids.shape[1]
    ends = set(torch.tensor(eos_token_id).reshape(-1).tolist()) if eos_token_id is not None else None
    finished = [False] * input_ids.shape[0]
    # a limit needs no text to look at
    limits = [each for each in stopping_criteria if type(each) is MaxLengthCriteria]
    others = [each for each in stopping_criteria if type(each) is not MaxLengthCriteria]
    step = input_ids
    while True:
        output = model(input_ids=step, attention_mask=attention_mask, past_key_values=past_key_values, return_dict=True)
        found = past_key_values.most_likely
        tokens = None if found is None or logits_processor else found.of(output.logits)
        if tokens is None:
            scores = output.logits[:, -1]
            if logits_processor:
                scores = logits_processor(texts.so_far(), scores)
            tokens = scores.argmax(dim=-1)
        if ends is not None:
            # on the host: it has to know whether all rows are finished in any case
            numbers = tokens.tolist()
            if any(finished):
                tokens = tokens.masked_fill(torch.tensor(finished, device=tokens.device), pad_token_id)
            finished = [before or number in ends for before, number in zip(finished, numbers)]
        step, attention_mask = tokens[:, None], None
        texts.append(step)
        length += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        if all(finished) or any(length >= limit.max_length for limit in limits):
            break
        if any(criterion(texts.so_far(), None) for criterion in others):
            break
    if streamer is not None:
        streamer.end()
    return texts.so_far()


class MostLikely:
    """The most likely tokens that a step found on its way, good for the logits that it returned, as they were.

    Args:
        logits: (batch, 1, vocabulary), what the step returns.
        tokens: (batch,) int64.
    """

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        self._logits, self._tokens = logits, tokens
        # tensors made in inference mode don't count their changes
        self._version = None if logits.is_inference() else logits._version

    def of(self, logits: Tensor) -> Tensor | None:
        """The tokens, or None when a hook or a subclass has put others in the logits' place or written to them."""
        same = logits is self._logits and self._version is not None and logits._version == self._version
        return self._tokens if same else None


class _Texts:
    """The prompts and the tokens behind them, put together when they are asked for."""

    def __init__(self, input_ids: Tensor) -> None:
        self._parts = [input_ids]

    def append(self, tokens: Tensor) -> None:
        """One more token for each row, (batch, 1)."""
        self._parts.append(tokens)

    def so_far(self) -> Tensor:
        """(batch, length) int64."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=1)]
        return self._parts[0]
