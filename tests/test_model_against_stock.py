"""float32 logits of prefill and of 32 decode steps are stock transformers' within 1e-4, whatever is on or off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import SHAPES, VOCABULARY, padded_batch, stock_logits, tuned_logits, tuned_model

from npu_tuned_model import TuningOptions

LENGTHS = [19, 3, 1, 12]
NEW_TOKENS = 32
OPTION_SETS = {
    "all_on": TuningOptions(),
    "all_off": TuningOptions.none(),
    **{f"without_{name}": TuningOptions().replace(**{name: False}) for name in TuningOptions.names()},
    **{f"only_{name}": TuningOptions.none().replace(**{name: True}) for name in TuningOptions.names()},
}
NOT_ONLY = [name for name in OPTION_SETS if not name.startswith("only_")]


def check(checkpoints, shape: str, options: TuningOptions, compiled: bool) -> None:
    stock, folder = checkpoints[shape]
    ids, mask = padded_batch(LENGTHS)
    new_ids = torch.randint(2, VOCABULARY, (len(LENGTHS), NEW_TOKENS), generator=torch.Generator().manual_seed(1))
    model = tuned_model(folder, options)
    if compiled:
        model.run_graph()
    expected = stock_logits(stock, ids, mask, new_ids)
    actual = tuned_logits(model, ids, mask, new_ids)
    assert expected.abs().max() > 0.1  # the comparison means something
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_eager(checkpoints, shape):
    check(checkpoints, shape, TuningOptions(), compiled=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_compiled(checkpoints, shape):
    check(checkpoints, shape, TuningOptions(), compiled=True)


@pytest.mark.parametrize("options", OPTION_SETS)
def test_every_option_eager(checkpoints, options):
    check(checkpoints, "gqa_4_2_head_16", OPTION_SETS[options], compiled=False)


@pytest.mark.parametrize("options", NOT_ONLY)
def test_every_option_compiled(checkpoints, options):
    check(checkpoints, "gqa_4_2_head_16", OPTION_SETS[options], compiled=True)


def test_all_logits_come_in_the_callers_order(checkpoints):
    stock, folder = checkpoints["gqa_4_2_head_16"]
    model = tuned_model(folder, TuningOptions().replace(last_token_logits=False))
    for side in ("left", "right"):
        ids, mask = padded_batch(LENGTHS, side=side)
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            expected = stock(ids, attention_mask=mask, position_ids=positions).logits
        actual = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def eager_model(checkpoints):
    return tuned_model(checkpoints["gqa_4_2_head_16"][1])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    extra=st.integers(0, 6),
    data=st.data(),
)
def test_any_padding_gives_the_same_logits(eager_model, lengths, extra, data):
    """Padding in front, behind, in the middle or nowhere: a row's logits are those of the row alone."""
    width = max(lengths) + extra
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    prompts = []
    for row, length in enumerate(lengths):
        columns = data.draw(st.permutations(range(width)))[:length]
        prompt = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))
        ids[row, sorted(columns)] = prompt
        mask[row, sorted(columns)] = 1
        prompts.append(prompt)
    new_ids = torch.full((len(lengths), 2), 7)
    together = tuned_logits(eager_model, ids, mask, new_ids)
    for row, prompt in enumerate(prompts):
        alone = tuned_logits(eager_model, prompt[None], None, new_ids[:1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=0)
