"""Two ranks generate the tokens of one rank and of stock transformers, and each holds half of the weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import padded_batch, save, stock_logits, stock_model, tiny_config, tuned_model
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM as StockQwen2
from two_ranks import LENGTHS, first_logits, generate, held_elements

from npu_tuned_model import TuningOptions, UserError, load_model
from npu_tuned_model.checkpoint_convert import Conversion
from npu_tuned_model.cpu_decode import why_no_cpu_decode
from npu_tuned_model.errors import CheckpointError
from npu_tuned_model.linear import PackedLinear
from npu_tuned_model.tensor_parallel import TensorParallel

TOKENS = {"untied": 64, "untied_converted": 64, "untied_compiled": 64}
FEW_TOKENS = 16
# one KV head on two ranks: both hold it
MODELS = {"untied": "gqa_4_2_head_16", "tied": "gqa_14_2_head_64", "one_kv_head": "gqa_4_2_head_16"}
CASES = {
    "untied": ("untied", "plain", False, "all"),
    "untied_converted": ("untied", "converted", False, "all"),
    "untied_compiled": ("untied", "plain", True, "all"),
    "untied_nothing_tuned": ("untied", "plain", False, "none"),
    "tied": ("tied", "plain", False, "all"),
    "tied_converted": ("tied", "converted", False, "all"),
    "one_kv_head": ("one_kv_head", "plain", False, "all"),
    "one_kv_head_converted": ("one_kv_head", "converted", False, "all"),
}
# quantised while loading; their tokens are those of one rank with the same weights
INT8_CASES = {
    "untied_int8": ("untied", "plain", False, "all"),
    "tied_int8": ("tied", "plain", False, "all"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[StockQwen2, Path]]:
    models = {}
    for name, shape in MODELS.items():
        config = tiny_config(shape)
        if name == "one_kv_head":
            config.num_key_value_heads = 1
        # two ranks' shares of the vocabulary differ
        config.vocab_size += 1
        model = stock_model(config)
        models[name] = (model, save(model, tmp_path_factory.mktemp(name)))
    return models


@pytest.fixture(scope="module")
def converted(plain: dict[str, tuple[StockQwen2, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (_, folder) in plain.items():
        folders[name] = tmp_path_factory.mktemp("converted") / name
        Conversion(folder, folders[name], tp_size=2, max_shard_bytes=100_000).write()
    return folders


@pytest.fixture(scope="module")
def ranks(
    plain: dict[str, tuple[StockQwen2, Path]], converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    work = tmp_path_factory.mktemp("ranks")
    cases = {
        name: {
            "folder": str(plain[model][1] if kind == "plain" else converted[model]),
            "graph": graph,
            "options": options,
            "tokens": TOKENS.get(name, FEW_TOKENS),
            "weight_dtype": "int8" if name in INT8_CASES else None,
        }
        for name, (model, kind, graph, options) in {**CASES, **INT8_CASES}.items()
    }
    (work / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("two_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, str(script), str(work / "cases.json"), str(work)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [torch.load(work / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_generate_the_tokens_of_one_and_of_stock(
    ranks: list[dict[str, Any]], plain: dict[str, tuple[StockQwen2, Path]], case: str
) -> None:
    stock, folder = plain[CASES[case][0]]
    one = tuned_model(folder)
    tokens = TOKENS.get(case, FEW_TOKENS)
    expected = generate(one, tokens)
    ids, mask = padded_batch(LENGTHS)
    reference = stock.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    assert torch.equal(expected, reference[:, max(LENGTHS) :])
    assert len(expected.unique()) > 8  # a model that repeats itself would prove little
    for rank in ranks:
        assert torch.equal(rank[case]["tokens"], expected)
        torch.testing.assert_close(rank[case]["logits"], first_logits(one), atol=1e-4, rtol=0)
    assert torch.equal(ranks[0][case]["logits"], ranks[1][case]["logits"])
    torch.testing.assert_close(
        ranks[0][case]["logits"], stock_logits(stock, ids, mask, ids[:, :0])[:, -1], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("case", INT8_CASES)
def test_two_ranks_with_int8_weights_generate_the_tokens_of_one(
    ranks: list[dict[str, Any]], plain: dict[str, tuple[StockQwen2, Path]], case: str
) -> None:
    one = load_model(plain[INT8_CASES[case][0]][1], device="cpu", dtype="float32", weight_dtype="int8")
    expected = generate(one, FEW_TOKENS)
    for rank in ranks:
        assert torch.equal(rank[case]["tokens"], expected)
        torch.testing.assert_close(rank[case]["logits"], first_logits(one), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_share_of_the_weights(
    ranks: list[dict[str, Any]], plain: dict[str, tuple[StockQwen2, Path]], case: str
) -> None:
    model = CASES[case][0]
    whole = held_elements(tuned_model(plain[model][1]))
    for rank in ranks:
        assert 0.49 * whole < rank[case]["held"] <= 0.55 * whole


def test_ranks_sample_the_same_tokens(ranks: list[dict[str, Any]]) -> None:
    assert torch.equal(ranks[0]["untied"]["sampled"], ranks[1]["untied"]["sampled"])
    assert not torch.equal(ranks[0]["untied"]["sampled"], ranks[0]["untied"]["tokens"][:, :16])


def test_a_rank_does_not_save_its_part_as_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert "one rank's part of the model" in ranks[0]["untied"]["saving"]


@pytest.mark.parametrize("size", [1, 4])
def test_a_converted_checkpoint_on_other_ranks_is_refused(converted: dict[str, Path], size: int) -> None:
    parallel = TensorParallel(0, size) if size > 1 else None
    with pytest.raises(CheckpointError, match=r"converted for tp_size 2") as excinfo:
        load_model(converted["one_kv_head"], device="cpu", parallel=parallel)
    assert f"tools/merge_qkv_weight.py --model_path=PLAIN --output_path=OUT --tp_size={size}" in str(excinfo.value)


def test_ranks_that_do_not_divide_the_model_are_refused(plain: dict[str, tuple[StockQwen2, Path]]) -> None:
    with pytest.raises(UserError, match="14 attention heads over 8 ranks; sizes that work: 1, 2"):
        load_model(plain["tied"][1], device="cpu", parallel=TensorParallel(0, 8))


class Counter:
    """Stands in for the sum over the ranks, which one process can't make."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return tensor


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_that_is_stored_anew_after_loading_is_still_summed(
    plain: dict[str, tuple[StockQwen2, Path]], packed: bool
) -> None:
    """As an NPU's set-up does: it looks for linear layers by their names and puts others in their places."""
    count = Counter()
    options = TuningOptions().replace(packed_weights=packed)
    parallel = TensorParallel(1, 2, count)
    model = load_model(plain["untied"][1], device="cpu", dtype="float32", options=options, parallel=parallel)
    assert model.is_packed() == packed
    replaced = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, PackedLinear)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, copy.copy(module))
            replaced += 1
    assert replaced == 1 + 4 * 2
    first_logits(model)
    assert count.calls == 1 + 2 * 2 + 1  # embedding, two per layer, logits


def test_a_kernel_for_the_whole_step_does_not_take_a_part_for_the_whole(tmp_path: Path) -> None:
    config = tiny_config("mha_4_head_64")
    config.intermediate_size = 256
    folder = save(stock_model(config), tmp_path / "model")
    whole = load_model(folder, device="cpu", dtype="bfloat16")
    part = load_model(folder, device="cpu", dtype="bfloat16", parallel=TensorParallel(0, 2, Counter()))
    part.run_graph()
    assert part.steps.cpu_decode is None
    # the reason is the same on every CPU where the whole model has the kernel
    if why_no_cpu_decode(whole) is None:
        assert why_no_cpu_decode(part) == "needs packed weights, whole on this rank"


def test_without_a_process_group_there_is_no_place() -> None:
    with pytest.raises(UserError, match="start the script with torchrun or deepspeed"):
        TensorParallel.of_process_group()
