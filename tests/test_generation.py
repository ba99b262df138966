"""The ordinary generate(): stock's tokens for greedy search, everything users pass, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from models import VOCABULARY, padded_batch, tuned_model
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from npu_tuned_model import TuningOptions, UserError


@pytest.fixture(scope="module")
def pair(checkpoints):
    stock, folder = checkpoints["gqa_4_2_head_16"]
    return stock, tuned_model(folder)


@pytest.mark.parametrize("lengths", [[7], [19, 3, 1, 12]])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"repetition_penalty": 1.3},
        {"eos_token_id": [3, 11, 250]},
        {"min_new_tokens": 5, "eos_token_id": 17},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [9]]},
        {"max_time": 1e6},
        {"eos_token_id": None},
        {"return_dict_in_generate": True},
    ],
    ids=lambda arguments: "_".join(arguments) or "plain",
)
def test_greedy_tokens_are_stocks(pair, lengths, arguments):
    stock, tuned = pair
    ids, mask = padded_batch(lengths)
    arguments = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **arguments}
    expected = stock.generate(ids, attention_mask=mask, **arguments)
    actual = tuned.generate(ids, attention_mask=mask, **arguments)
    if "return_dict_in_generate" in arguments:
        expected, actual = expected.sequences, actual.sequences
    assert torch.equal(actual, expected)
    assert len(set(actual[0, ids.shape[1] :].tolist())) > 3  # not one token for ever


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6, "temperature": 1.5},
        {"repetition_penalty": 1.2, "top_k": 20},
        {"num_return_sequences": 3},
    ],
    ids=lambda arguments: "_".join(arguments),
)
def test_sampled_tokens_are_stocks_under_the_same_seed(pair, arguments):
    stock, tuned = pair
    ids, mask = padded_batch([6, 2])
    arguments = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, **arguments}
    torch.manual_seed(5)
    expected = stock.generate(ids, attention_mask=mask, **arguments)
    torch.manual_seed(5)
    actual = tuned.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(actual, expected)


def test_plain_greedy_search_needs_no_loop_of_transformers(pair, monkeypatch):
    _, tuned = pair
    ids, mask = padded_batch([6, 2])
    monkeypatch.setattr(GenerationMixin, "greedy_search", lambda *given, **options: pytest.fail("transformers' loop"))
    assert tuned.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0).shape == (2, 11)


def test_scores_and_dictionary_output(pair):
    stock, tuned = pair
    ids, mask = padded_batch([6, 2])
    arguments = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    expected = stock.generate(ids, attention_mask=mask, **arguments)
    actual = tuned.generate(ids, attention_mask=mask, **arguments)
    for ours, theirs in zip(actual.scores, expected.scores):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_without_a_cache_the_tokens_are_the_same(pair):
    _, tuned = pair
    ids, mask = padded_batch([6, 2])
    with_cache = tuned.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0)
    without = tuned.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, use_cache=False)
    assert torch.equal(with_cache, without)


def test_stopping_criteria(pair):
    class AfterFour(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= 10

    _, tuned = pair
    ids, mask = padded_batch([6])
    out = tuned.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=30,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([AfterFour()]),
    )
    assert out.shape[1] == 10


def test_streamer_sees_every_token(pair):
    class Collector(BaseStreamer):
        def __init__(self):
            self.tokens = []
            self.ended = False

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    _, tuned = pair
    ids, mask = padded_batch([6])
    collector = Collector()
    out = tuned.generate(ids, attention_mask=mask, max_new_tokens=9, pad_token_id=0, streamer=collector)
    assert collector.tokens == out[0].tolist()
    assert collector.ended


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 4}, "beam search.*num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions.*eager"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "forward hooks"),
        ({"max_new_tokens": 2000}, "exceed the model's context of 1024"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_generate_does_not_offer(pair, arguments, words):
    _, tuned = pair
    ids, mask = padded_batch([6])
    with pytest.raises(UserError, match=words):
        tuned.generate(ids, attention_mask=mask, pad_token_id=0, **{"max_new_tokens": 4, **arguments})


def test_assisted_generation_is_refused(pair):
    stock, tuned = pair
    ids, mask = padded_batch([6])
    with pytest.raises(UserError, match="assisted generation"):
        tuned.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=4, assistant_model=stock)


def test_what_forward_does_not_offer(pair):
    _, tuned = pair
    ids, mask = padded_batch([6, 3])
    for name, value in {
        "labels": ids,
        "inputs_embeds": torch.zeros(2, 6, 64),
        "position_ids": ids,
        "output_attentions": True,
        "output_hidden_states": True,
    }.items():
        with pytest.raises(UserError, match=name if name != "labels" else "loss"):
            tuned(ids, attention_mask=mask, **{name: value})
    with pytest.raises(UserError, match="at least one token"):
        tuned(ids[:, :0])
    with pytest.raises(UserError, match="one shape"):
        tuned(ids, attention_mask=mask[:, 1:])
    with pytest.raises(UserError, match="row 1 of attention_mask is all padding"):
        tuned(ids, attention_mask=mask * torch.tensor([[1], [0]]))
    with pytest.raises(UserError, match=r"new_cache\(batch, capacity\)"):
        tuned(ids, attention_mask=mask, past_key_values=((ids, ids),))


def test_a_cache_that_is_too_short_says_so(pair):
    _, tuned = pair
    ids, mask = padded_batch([6, 3])
    cache = tuned.new_cache(2, 7)
    tuned(ids, attention_mask=mask, past_key_values=cache)
    tuned(ids[:, :1], past_key_values=cache)
    with pytest.raises(UserError, match="holds 7 tokens per row and 7 \\+ 1 are asked for"):
        tuned(ids[:, :1], past_key_values=cache)
    with pytest.raises(UserError, match="one at a time"):
        tuned(ids[:, :2], past_key_values=cache)
    with pytest.raises(UserError, match="for 2 rows and input_ids has 1"):
        tuned(ids[:1, :1], past_key_values=cache)
    with pytest.raises(UserError, match="context of 1024"):
        tuned.new_cache(1, 1025)
    with pytest.raises(UserError, match="holds 4 tokens"):
        tuned(ids, attention_mask=mask, past_key_values=tuned.new_cache(2, 4))


def test_two_graphs_for_a_generation_of_200_tokens(checkpoints):
    """One prefill graph and one decode graph per shape, and none once the shape has been seen."""
    tuned = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    eager = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    tuned.run_graph()
    for lengths in ([100, 40], [90, 80], [64, 1]):
        ids, mask = padded_batch(lengths)
        arguments = {"attention_mask": mask, "max_new_tokens": 200, "pad_token_id": 0}
        assert torch.equal(tuned.generate(ids, **arguments), eager.generate(ids, **arguments))
        assert tuned.steps.graphs == {"prefill": 1, "decode": 1}
    ids, mask = padded_batch([200, 3])  # another prompt bucket: one more prefill graph, the decode graph is shared
    tuned.generate(ids, attention_mask=mask, max_new_tokens=50, pad_token_id=0)
    assert tuned.steps.graphs == {"prefill": 2, "decode": 1}


def test_decode_fills_the_cache_to_its_last_slot(checkpoints):
    stock, folder = checkpoints["gqa_4_2_head_16"]
    tuned = tuned_model(folder, TuningOptions())
    tuned.run_graph()
    ids = torch.randint(2, VOCABULARY, (1, 1000), generator=torch.Generator().manual_seed(0))
    expected = stock.generate(ids, max_new_tokens=24, pad_token_id=0)
    assert torch.equal(tuned.generate(ids, max_new_tokens=24, pad_token_id=0), expected)
    assert tuned.steps.graphs == {"prefill": 1, "decode": 1}
