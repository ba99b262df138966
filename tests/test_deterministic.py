"""deterministic: a prompt's logits are the same bits alone and in any batch, and from run to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import VOCABULARY, padded_batch, tiny_config, tuned_logits
from torch import Tensor
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import GraphOptions, Qwen2ForCausalLM, TuningOptions, UserError, cpu_kernels, load_model
from npu_tuned_model.deterministic import SameStepsInEveryMode, determinism_in_force

LENGTHS = [37, 5, 21, 64, 9, 1, 50, 33, 18]
NEW = torch.randint(2, VOCABULARY, (len(LENGTHS), 3), generator=torch.Generator().manual_seed(1))


def load(folder: Path, dtype: str, *, graph: bool = False, **options: bool) -> Qwen2ForCausalLM:
    model = load_model(folder, device="cpu", dtype=dtype, options=TuningOptions(**options))
    if graph:
        model.run_graph(GraphOptions(prefill_bucket=64), deterministic=True)
    else:
        model.run_eager(deterministic=True)
    return model


def each_alone(model: Qwen2ForCausalLM) -> Tensor:
    rows = [
        tuned_logits(model, *padded_batch([length], seed=row), NEW[row : row + 1]) for row, length in enumerate(LENGTHS)
    ]
    return torch.cat(rows)


def together(model: Qwen2ForCausalLM, side: str = "left") -> Tensor:
    width = max(LENGTHS)
    ids, mask = (torch.zeros(len(LENGTHS), width, dtype=torch.int64) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        place = slice(width - length, None) if side == "left" else slice(None, length)
        ids[row, place], mask[row, place] = padded_batch([length], seed=row)[0][0], 1
    return tuned_logits(model, ids, mask, NEW)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_row_is_the_same_bits_alone_and_in_a_batch(checkpoints, dtype, graph):
    model = load(checkpoints["gqa_4_2_head_16"][1], dtype, graph=graph)
    alone = each_alone(model)
    for side in ("left", "right"):
        assert torch.equal(together(model, side), alone)
    assert torch.equal(each_alone(model), alone)


@pytest.mark.parametrize("shape", ["gqa_14_2_head_64", "mha_4_head_64"])
def test_the_whole_cpu_step(tmp_path, shape):
    """Its groups of eight rows change nothing, and eager and graph mode are one."""
    if cpu_kernels.why_not() is not None:
        pytest.skip(str(cpu_kernels.why_not()))
    config = tiny_config(shape)
    config.intermediate_size = 128
    torch.manual_seed(0)
    StockQwen2(config).save_pretrained(tmp_path)
    model = load(tmp_path, "bfloat16")
    assert isinstance(model.steps, SameStepsInEveryMode)
    alone = each_alone(model)
    assert torch.equal(together(model), alone)
    assert torch.equal(together(load(tmp_path, "bfloat16", graph=True)), alone)
    assert determinism_in_force(model).why.endswith("eager and graph agree")


def test_all_logits_of_a_prompt(checkpoints):
    model = load(checkpoints["gqa_4_2_head_16"][1], "float32", last_token_logits=False)
    ids, mask = padded_batch([7, 3])
    whole = model(ids, attention_mask=mask).logits
    assert whole.shape == (2, 7, VOCABULARY)
    assert torch.equal(whole[1:, 4:], model(ids[1:, 4:]).logits)
    assert torch.equal(whole[:1], model(ids[:1]).logits)


def test_a_growing_cache_is_refused(checkpoints):
    with pytest.raises(UserError, match="deterministic needs fixed_kv_cache"):
        load(checkpoints["gqa_4_2_head_16"][1], "float32", fixed_kv_cache=False)


def test_it_says_what_it_promises(checkpoints):
    model = load(checkpoints["gqa_4_2_head_16"][1], "float32")
    assert determinism_in_force(model).why.endswith("eager and graph may differ")
    model.run_eager()
    assert not determinism_in_force(model).active
