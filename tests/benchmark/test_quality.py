"""benchmark.quality: the perplexity that torch computes, and shares that follow from tokens; its text; its refusals."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner
from models import save, stock_model, tiny_config
from torch.nn.functional import cross_entropy

from benchmark.quality import TEXT, line, main, measure, read_passages
from npu_tuned_model import TuningOptions, UserError, load_model

IDS = [torch.randint(2, 320, (1, 24), generator=torch.Generator().manual_seed(row)) for row in range(3)]
ALL_LOGITS = TuningOptions().replace(last_token_logits=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(stock_model(tiny_config()), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder):
    return load_model(folder, device="cpu", dtype="float32", options=ALL_LOGITS)


def test_perplexity_is_that_of_stock(reference):
    stock = stock_model(tiny_config())
    with torch.no_grad():
        losses = [cross_entropy(stock(row).logits[0, :-1], row[0, 1:]) for row in IDS]
    result = measure(reference, reference, IDS, new_tokens=6)
    assert result.perplexity == pytest.approx(math.exp(torch.stack(losses).mean()), rel=1e-4)


def test_a_model_keeps_its_own_tokens(reference):
    result = measure(reference, reference, IDS, new_tokens=6)
    assert (result.kept, result.generated) == (18, 18)
    assert (result.agreed, result.read) == (72, 72)
    assert "18/18 (100.00%)" in line("float32", result)


def test_another_model_keeps_few(reference, tmp_path):
    other = save(stock_model(tiny_config(), seed=1), tmp_path)
    result = measure(load_model(other, device="cpu", dtype="float32", options=ALL_LOGITS), reference, IDS, new_tokens=6)
    assert result.kept < 9
    assert result.agreed < 36


def test_int8_weights_keep_most(folder, reference):
    model = load_model(folder, device="cpu", dtype="float32", options=ALL_LOGITS, weight_dtype="int8")
    result = measure(model, reference, IDS, new_tokens=6)
    assert result.perplexity == pytest.approx(measure(reference, reference, IDS, new_tokens=6).perplexity, rel=0.02)
    assert result.kept > 12


def test_the_text_has_languages_and_code():
    passages = read_passages(TEXT)
    assert len(passages) >= 6
    assert any("def " in passage for passage in passages)
    assert any("的" in passage for passage in passages)
    assert sum(map(len, passages)) > 8000


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty text"), (b"a\n===\n\n===\nb", "empty"), (b"\xff", "UTF-8")]
)
def test_texts_that_cannot_be_used(tmp_path, content, message):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_passages(file)


def test_a_mistake_is_one_line(tmp_path):
    outcome = CliRunner().invoke(main, [f"--model_path={tmp_path}"])
    assert outcome.exit_code != 0
    assert "has no config.json" in outcome.output
    assert outcome.output.count("\n") == 1
