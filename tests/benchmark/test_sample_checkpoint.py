"""The sample checkpoint: the same for the same seed, complete or absent, built once, and fit for comparing texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmark import sample_checkpoint
from benchmark.sample_checkpoint import CONFIG, build, make_weights
from npu_tuned_model import load_model
from npu_tuned_model.errors import UserError


def test_the_same_seed_gives_the_same_weights() -> None:
    config = {**CONFIG, **TINY}
    one, two, other = (make_weights(config, seed) for seed in (1, 1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_a_complete_bfloat16_state_dict(tied: bool) -> None:
    config = {**CONFIG, **TINY, "tie_word_embeddings": tied}
    weights = make_weights(config, 1)
    expected = Qwen2ForCausalLM(Qwen2Config(**config)).state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_full_shape_is_that_of_qwen2_0_5b() -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "torch_dtype"}))
    assert sum(parameter.numel() for parameter in model.parameters()) == 494_032_768


def test_stock_and_tuned_write_the_same_varied_text(tiny_checkpoint: Path) -> None:
    prompt = torch.tensor([list(b"The quick brown fox")])
    stock = Qwen2ForCausalLM.from_pretrained(str(tiny_checkpoint), torch_dtype=torch.float32)
    tuned = load_model(tiny_checkpoint, device="cpu", dtype="float32")
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False}
    expected = stock.generate(prompt, **arguments)
    assert torch.equal(tuned.generate(prompt, **arguments), expected)
    assert expected[0, prompt.shape[1] :].unique().numel() > 3


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path / "cache" / "sample", overrides=TINY)
    assert list((tmp_path / "cache").iterdir()) == []


def test_it_is_built_once_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sample_checkpoint, "CONFIG", {**CONFIG, **TINY})
    announced: list[Path] = []
    first = sample_checkpoint.sample_checkpoint(announced.append)
    assert announced == [first]
    assert first.is_relative_to(tmp_path)
    content = load_file(str(first / "model.safetensors"))
    assert sample_checkpoint.sample_checkpoint(announced.append) == first
    assert len(announced) == 1
    assert content
    assert json.loads((first / "config.json").read_text())["model_type"] == "qwen2"


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sample"
    original = sample_checkpoint.save_file

    def slow_save(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        folder.mkdir()
        (folder / "config.json").write_text("the other's")

    monkeypatch.setattr(sample_checkpoint, "save_file", slow_save)
    build(folder, overrides=TINY)
    assert (folder / "config.json").read_text() == "the other's"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME") as error:
        sample_checkpoint.sample_checkpoint()
    assert "\n" not in str(error.value)
