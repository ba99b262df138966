"""check_precision: a healthy model passes, a planted fault is named by layer and op, misuse is one line."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, Callable

import check_precision
import precision_checks
import pytest
import torch
from click.testing import CliRunner
from models import padded_batch, tuned_model
from torch import Tensor
from torch.nn import Module

from npu_tuned_model import Qwen2ForCausalLM, TuningOptions
from precision.compare import Comparison, Row, verdict
from precision.compare.metrics import tensor_errors

SHAPE = "gqa_4_2_head_16"
LAYER = 1


def in_layer(model: Qwen2ForCausalLM, path: str, **ops: Callable[..., Any]) -> None:
    """Give one module of a layer other operators."""
    module: Any = model.get_submodule(f"model.layers.{LAYER}.{path}")
    module.ops = dataclasses.replace(module.ops, **ops)


def in_attention(model: Qwen2ForCausalLM, **changes: Any) -> None:
    """Change the attention calls of one layer; the steps take their operator from the model's table."""

    def wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls = iter(range(10**9))

        def call(*args: Any, **kwargs: Any) -> Tensor:
            if next(calls) % len(model.model.layers) == LAYER:
                kwargs.update({name: change(args, kwargs) for name, change in changes.items() if name in kwargs})
            return function(*args, **kwargs)

        return call

    table = model.model.ops
    model.model.ops = dataclasses.replace(
        table,
        prompt_flash_attention=wrapped(table.prompt_flash_attention),
        incre_flash_attention=wrapped(table.incre_flash_attention),
    )


def wrong_rotary_sign(model: Qwen2ForCausalLM) -> None:
    rotate = model.model.ops.apply_rotary_pos_emb
    in_layer(model, "self_attn", apply_rotary_pos_emb=lambda q, k, cos, sin: rotate(q, k, cos, -sin))


def norm_in_bfloat16(model: Qwen2ForCausalLM) -> None:
    norm = model.model.ops.add_rms_norm

    def rounded(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        low = (value.bfloat16() for value in (hidden, residual, weight))
        y, rstd, _ = norm(*low, eps)
        return y.to(hidden.dtype), rstd, hidden + residual

    in_layer(model, "post_attention_layernorm", add_rms_norm=rounded)


def mask_off_by_one(model: Qwen2ForCausalLM) -> None:
    def later(args: Any, kwargs: Any) -> Tensor:
        size = args[0].shape[1]
        return torch.ones(size, size, dtype=torch.bool).triu(2)[None, None]

    in_attention(model, atten_mask=later, sparse_mode=lambda args, kwargs: 0)


def decode_misses_the_last_token(model: Qwen2ForCausalLM) -> None:
    in_attention(model, actual_seq_lengths=lambda args, kwargs: kwargs["actual_seq_lengths"] - 1)


def scale_of_one(model: Qwen2ForCausalLM) -> None:
    in_attention(model, scale_value=lambda args, kwargs: 1.0)


FAULTS = [
    (wrong_rotary_sign, "layer 1, npu_apply_rotary_pos_emb in self_attn, prefill"),
    (norm_in_bfloat16, "layer 1, npu_add_rms_norm in post_attention_layernorm, prefill"),
    (mask_off_by_one, "layer 1, npu_prompt_flash_attention in self_attn, prefill"),
    (scale_of_one, "layer 1, npu_prompt_flash_attention in self_attn, prefill"),
    (decode_misses_the_last_token, "layer 1, npu_incre_flash_attention in self_attn, decode step 1"),
]


def check(stock: Module, model: Qwen2ForCausalLM, folder: Path) -> Any:
    ids, _ = padded_batch([9, 9])
    return precision_checks.stock_against_tuned(stock, model, ids, folder)


def test_a_healthy_model_is_the_same(checkpoints: Any, tmp_path: Path) -> None:
    stock, folder = checkpoints[SHAPE]
    outcome = check(stock, tuned_model(folder), tmp_path)
    assert outcome.passed
    assert outcome.culprit is None
    compared = {row.address for row in outcome.comparison.rows}
    # every op of every layer has a counterpart in stock, in prefill and in decode
    for layer in range(2):
        for op in (
            "self_attn.qkv",
            "self_attn/npu_apply_rotary_pos_emb",
            "self_attn/npu_prompt_flash_attention",
            "self_attn/npu_incre_flash_attention",
            "post_attention_layernorm/npu_add_rms_norm",
            "mlp/npu_swiglu",
        ):
            assert f"model.layers.{layer}.{op}" in compared


@pytest.mark.parametrize(("plant", "culprit"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_named(plant: Any, culprit: str, checkpoints: Any, tmp_path: Path) -> None:
    stock, folder = checkpoints[SHAPE]
    model = tuned_model(folder)
    plant(model)
    outcome = check(stock, model, tmp_path)
    assert not outcome.passed
    assert outcome.culprit == culprit


def test_in_bfloat16_both_are_held_against_float32(checkpoints: Any, tmp_path: Path) -> None:
    stock, folder = checkpoints[SHAPE]
    narrow = copy.deepcopy(stock).bfloat16()
    outcome = check(narrow, tuned_model(folder, dtype="bfloat16"), tmp_path / "healthy")
    assert outcome.passed
    assert "golden is stock in float32" in outcome.comparison.notes[0]
    for plant, culprit in FAULTS:
        if plant is not norm_in_bfloat16:
            model = tuned_model(folder, dtype="bfloat16")
            plant(model)
            assert check(narrow, model, tmp_path / plant.__name__).culprit == culprit


def test_what_stock_itself_is_off_is_allowed_and_no_more() -> None:
    def row(golden: str, error: float) -> Row:
        errors = tensor_errors(torch.tensor([1.0 + error]), torch.tensor([1.0]))
        judged = verdict.judge(errors, 0.04)
        return Row("step0", golden, golden, "layer", 0, "output.0", "bfloat16", [1], judged, error, 0.04, errors)

    tuned = Comparison([row("scores", 0.25), row("norm", 0.03), row("linear", 0.25), row("unknown", 0.25)])
    stocks = Comparison([row("scores", 0.16), row("norm", 0.001), row("linear", 0.1)])
    precision_checks.allow_own_errors(tuned, stocks)
    assert [one.verdict for one in tuned.rows] == ["close", "close", "different", "different"]
    assert [one.allowed for one in tuned.rows] == pytest.approx([0.32, 0.04, 0.2, 0.04])


def test_graph_nodes_match_eager_calls_and_a_graph_only_fault_is_found(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints[SHAPE]
    ids, _ = padded_batch([9, 9])
    model = tuned_model(folder)
    healthy = precision_checks.eager_against_graph(model, ids, ids[:, :2], tmp_path / "healthy")
    assert healthy.passed
    addresses = {row.address for row in healthy.comparison.rows if row.golden and row.target}
    assert "model.layers.1.mlp.down_proj/packed_linear" in addresses
    in_layer(model, "mlp", gate_up_swiglu=_swapped_when_compiled(model.model.ops.gate_up_swiglu))
    faulty = precision_checks.eager_against_graph(model, ids, ids[:, :2], tmp_path / "faulty")
    assert not faulty.passed
    assert faulty.culprit is not None
    assert faulty.culprit.startswith("layer 1, ")
    assert "mlp" in faulty.culprit


def _swapped_when_compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(gate_up: Module, hidden: Tensor) -> Tensor:
        result = function(gate_up, hidden)
        return result * 1.01 if torch.compiler.is_compiling() else result

    return call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_one_and_a_fault_on_one_side_is_named(checkpoints: Any, tmp_path: Path, dtype: str) -> None:
    _, folder = checkpoints[SHAPE]
    ids, _ = padded_batch([9, 9])
    model = tuned_model(folder, dtype=dtype)
    healthy = precision_checks.one_rank_against_many(model, folder, 2, ids, ids[:, :2], tmp_path / "healthy")
    assert healthy.passed
    compared = {row.address: row.message for row in healthy.comparison.rows if row.errors is not None}
    for path in ("self_attn.qkv", "mlp.gate_up_proj", "mlp.down_proj", "input_layernorm"):
        assert f"model.layers.1.{path}" in compared
    assert compared["model.layers.1.self_attn.qkv"] == "joined along dimension 1"
    assert "lm_head" in compared
    if dtype == "bfloat16":
        return
    scale_of_one(model)
    faulty = precision_checks.one_rank_against_many(model, folder, 2, ids, ids[:, :2], tmp_path / "faulty")
    assert faulty.culprit == "layer 1, npu_prompt_flash_attention in self_attn, prefill"


def test_ranks_that_do_not_divide_the_model_are_one_line(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints[SHAPE]
    arguments = ["--model_path", str(folder), "--output", str(tmp_path / "o"), "--no-graph", "--ranks=3"]
    result = CliRunner().invoke(check_precision.main, arguments)
    assert result.exit_code == 2
    assert "Error: the 3 ranks could not run: " in result.output
    assert "Traceback" not in result.output


def test_unfused_options_pass_as_well(checkpoints: Any, tmp_path: Path) -> None:
    stock, folder = checkpoints[SHAPE]
    assert check(stock, tuned_model(folder, TuningOptions.none()), tmp_path).passed


def test_text_differences_give_token_and_margin(checkpoints: Any, tmp_path: Path) -> None:
    stock, folder = checkpoints[SHAPE]
    model = tuned_model(folder)
    ids, mask = padded_batch([5, 9])
    assert precision_checks.text_differences(stock, model, ids, mask, 6) == ([], 12)
    scale_of_one(model)
    differences, _ = precision_checks.text_differences(stock, model, ids, mask, 6)
    assert differences
    assert all(entry.margin > 0 and entry.logit_error > 1e-3 for entry in differences)


def test_the_command_writes_one_page_and_its_status_says_the_verdict(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = checkpoints[SHAPE]
    output = tmp_path / "report"
    arguments = ["--model_path", str(folder), "--output", str(output), "--no-graph", "--new_tokens=2"]
    result = CliRunner().invoke(check_precision.main, arguments)
    assert result.exit_code == 0, result.output
    page = (output / "check_precision.html").read_text(encoding="utf-8")
    assert "yes, but for rounding" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "")
    again = CliRunner().invoke(check_precision.main, arguments)
    assert again.exit_code == 2
    assert "--force" in again.output
    real = check_precision.load_stock

    def broken(*args: Any) -> Any:
        model = real(*args)
        model.model.layers[0].mlp.act_fn = torch.nn.GELU()
        return model

    monkeypatch.setattr(check_precision, "load_stock", broken)
    failed = CliRunner().invoke(check_precision.main, [*arguments, "--force"])
    assert failed.exit_code == 1
    assert "layer 0, npu_swiglu in mlp, prefill" in failed.output


@pytest.mark.parametrize("content", ["[]", '["", "a"]', "{}", "no json"])
def test_wrong_prompts_are_one_line(content: str, checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints[SHAPE]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(content)
    arguments = ["--model_path", str(folder), "--output", str(tmp_path / "o"), "--prompts", str(prompts)]
    result = CliRunner().invoke(check_precision.main, arguments)
    assert result.exit_code == 2
    assert "Error: the prompts" in result.output
    assert "Traceback" not in result.output
