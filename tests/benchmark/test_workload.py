"""Prompts become exactly (batch, input_max_len) tokens, padded in front; what is cut or refused is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.workload import BUILT_IN_PROMPTS, load_tokenizer, make_workload, read_prompts
from npu_tuned_model.errors import UserError

CONTEXT = 160


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


def workload_of(tokenizer: Any, **changes: Any) -> Any:
    sizes = {"batch_size": 1, "input_max_len": 32, "max_new_tokens": 8, "context": CONTEXT}
    return make_workload(tokenizer, **{**sizes, **changes})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abc 你好\n", min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 6))
def test_prompts_are_padded_in_front_and_taken_in_turn(tokenizer: Any, prompts: list[str], batch_size: int) -> None:
    workload = workload_of(tokenizer, prompts=prompts, batch_size=batch_size, input_max_len=100)
    assert workload.input_ids.shape == workload.attention_mask.shape == (batch_size, 100)
    for row in range(batch_size):
        expected = list(prompts[row % len(prompts)].encode("utf-8"))
        count = workload.prompt_tokens[row]
        assert count == len(expected)
        assert workload.attention_mask[row].tolist() == [0] * (100 - count) + [1] * count
        text = tokenizer.decode(workload.input_ids[row, 100 - count :])
        assert text == prompts[row % len(prompts)]
    assert workload.warnings == []


def test_a_prompt_too_long_is_cut_with_a_warning_that_counts(tokenizer: Any) -> None:
    workload = workload_of(tokenizer, prompts=["short", "x" * 45], batch_size=2)
    assert workload.prompt_tokens == [5, 32]
    assert len(workload.warnings) == 1
    assert "prompt 2 has 45 tokens: 13 were cut at its end" in workload.warnings[0]


def test_a_prompt_that_is_not_used_is_not_warned_about(tokenizer: Any) -> None:
    assert workload_of(tokenizer, prompts=["short", "x" * 45], batch_size=1).warnings == []


def test_a_prompt_beyond_the_context_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="prompt 1 has 200 tokens and the model's context is 160"):
        workload_of(tokenizer, prompts=["x" * 200])


@pytest.mark.parametrize(("input_max_len", "fits"), [(CONTEXT - 8, True), (CONTEXT - 7, False)])
def test_prompt_and_new_tokens_must_fit_the_context(tokenizer: Any, input_max_len: int, fits: bool) -> None:
    if fits:
        assert workload_of(tokenizer, input_max_len=input_max_len).input_max_len == input_max_len
    else:
        with pytest.raises(UserError, match=r"--input_max_len=153 .* exceed the model's context of 160"):
            workload_of(tokenizer, input_max_len=input_max_len)


@pytest.mark.parametrize("input_max_len", [1, 9, 33, 150])
def test_built_in_texts_fill_the_length(tokenizer: Any, input_max_len: int) -> None:
    workload = workload_of(tokenizer, batch_size=len(BUILT_IN_PROMPTS) + 1, input_max_len=input_max_len)
    assert all(input_max_len - 11 <= count <= input_max_len for count in workload.prompt_tokens)
    assert min(workload.prompt_tokens) >= 1
    assert workload.warnings == []
    assert torch.equal(workload.input_ids[0], workload.input_ids[-1])


def test_the_chat_template_is_used_where_there_is_one(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    workload = workload_of(tokenizer, prompts=["hello"])
    assert workload.chat_template
    assert tokenizer.decode(workload.input_ids[0], skip_special_tokens=True) == "<user>hello<answer>"
    filled = workload_of(tokenizer, input_max_len=60)
    assert tokenizer.decode(filled.input_ids[0]).endswith("<answer>")


def test_a_folder_without_tokenizer_is_one_line(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    with pytest.raises(UserError, match="no tokenizer can be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_prompt_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first\n\n第二个\n", encoding="utf-8")
    assert read_prompts(lines) == ["first", "第二个"]
    listed = tmp_path / "prompts.json"
    listed.write_text(json.dumps(["two\nlines", "b"]), encoding="utf-8")
    assert read_prompts(listed) == ["two\nlines", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.json", b"[1, 2]", "JSON list of strings"),
        ("a.json", b'{"a": 1}', "JSON list of strings"),
        ("a.json", b'["a"', "not valid JSON"),
        ("a.json", b"[]", "holds no prompt"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_prompts(tmp_path / "none.txt")
