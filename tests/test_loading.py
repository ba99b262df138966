"""load_model and from_pretrained: one result, nothing held twice, and clear refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from models import padded_batch, stock_logits, tuned_logits, tuned_model
from torch import nn
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import CheckpointError, Qwen2ForCausalLM, TuningOptions, UserError, load_model
from npu_tuned_model.linear import InputMajorLinear, PackedLinear, packer_for, split_linear


@pytest.fixture(params=["gqa_4_2_head_16", "mha_4_head_64", "gqa_12_2_head_128"])
def checkpoint(request, checkpoints):
    return checkpoints[request.param]


def test_both_ways_of_loading_give_the_same_logits(checkpoint):
    _, folder = checkpoint
    ids, mask = padded_batch([5, 2])
    new_ids = ids[:, :3]
    ours = tuned_logits(load_model(folder, device="cpu", dtype="float32"), ids, mask, new_ids)
    for arguments in ({}, {"torch_dtype": torch.float32, "device_map": "cpu"}, {"torch_dtype": "auto"}):
        theirs = tuned_logits(Qwen2ForCausalLM.from_pretrained(folder, **arguments), ids, mask, new_ids)
        assert torch.equal(ours, theirs)


def test_a_model_that_is_built_runs_unpacked(checkpoint):
    stock, _ = checkpoint
    model = Qwen2ForCausalLM(stock.config).eval()
    assert not model.is_packed()
    ids, _ = padded_batch([5])
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0).shape == (1, 8)


def test_no_weight_is_held_twice(checkpoint):
    stock, folder = checkpoint
    model = load_model(folder, device="cpu", dtype="float32")
    assert model.is_packed()

    def count(module: nn.Module) -> int:
        tensors = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
        return sum(tensor.numel() for name, tensor in tensors.items())

    rotary = sum(buffer.numel() for buffer in model.model.rotary.buffers())
    stock_weights = sum(parameter.numel() for parameter in stock.parameters())
    assert count(model) - rotary == stock_weights
    if stock.config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saving_gives_back_the_checkpoint_bit_for_bit(checkpoint, tmp_path):
    stock, folder = checkpoint
    for options in (TuningOptions(), TuningOptions.none()):
        load_model(folder, device="cpu", dtype="float32", options=options).save_pretrained(tmp_path / "saved")
        again = StockQwen2.from_pretrained(tmp_path / "saved")
        for name, tensor in stock.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        shutil.rmtree(tmp_path / "saved")


def test_dtype_follows_the_checkpoint_unless_given(checkpoint, tmp_path):
    _, folder = checkpoint
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert load_model(tmp_path / "copy", device="cpu").dtype == torch.bfloat16
    assert load_model(tmp_path / "copy", device="cpu", dtype="float32").dtype == torch.float32
    assert load_model(tmp_path / "copy", device="cpu").model.rotary.cos.dtype == torch.bfloat16


def test_float16_warns(checkpoint):
    with pytest.warns(UserWarning, match="overflow in float16; use bfloat16"):
        load_model(checkpoint[1], device="cpu", dtype="float16")


def test_generation_config_comes_along(checkpoint, tmp_path):
    shutil.copytree(checkpoint[1], tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "top_k": 7}))
    assert load_model(tmp_path / "copy", device="cpu").generation_config.eos_token_id == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "tpu"}, "no device 'tpu'; there are auto, cpu, cuda, npu"),
        ({"device": "npu"}, "needs torch_npu"),
        ({"dtype": "int7"}, "no dtype 'int7'; there are float32, bfloat16, float16"),
    ],
)
def test_refusals(checkpoint, arguments, words):
    with pytest.raises(UserError, match=words):
        load_model(checkpoint[1], **{"device": "cpu", **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(checkpoint):
    with pytest.raises(UserError, match="needs a GPU"):
        load_model(checkpoint[1], device="cuda")


def test_from_pretrained_names_what_it_takes(checkpoint, tmp_path):
    with pytest.raises(UserError, match="doesn't take load_in_8bit; it takes torch_dtype"):
        Qwen2ForCausalLM.from_pretrained(checkpoint[1], load_in_8bit=True)
    with pytest.raises(UserError, match="one device"):
        Qwen2ForCausalLM.from_pretrained(checkpoint[1], device_map={"": 0})
    with pytest.raises(CheckpointError):
        Qwen2ForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_unknown_optimisation_names_those_there_are():
    with pytest.raises(UserError, match="no such optimisation: warp_drive; there are fixed_kv_cache"):
        TuningOptions().replace(warp_drive=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layouts_compute_the_same_and_give_the_weight_back(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    rows = torch.randn(5, 48, dtype=dtype)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    sizes = [48, 16, 16]
    for packed in (
        PackedLinear(linear.weight, linear.bias, [80]),
        PackedLinear(linear.weight, linear.bias, sizes),
        InputMajorLinear(linear.weight, linear.bias),
    ):
        assert torch.equal(packed.dense_weight(), linear.weight)
        torch.testing.assert_close(packed(rows), linear(rows), **tolerance)
    expected = linear(rows).split(sizes, dim=1)
    for layer in (
        linear,
        PackedLinear(linear.weight, linear.bias, sizes),
        InputMajorLinear(linear.weight, linear.bias),
    ):
        for part, whole in zip(split_linear(layer, rows, sizes), expected):
            torch.testing.assert_close(part, whole, **tolerance)
    with pytest.raises(ValueError, match=r"in pieces of \[80\]"):
        split_linear(PackedLinear(linear.weight, linear.bias, [80]), rows, sizes)


def test_only_what_the_device_gains_from_is_packed():
    assert packer_for("cpu", torch.float16) is None
    assert packer_for("cuda", torch.bfloat16) is None
    npu_layer = packer_for("npu", torch.bfloat16)(nn.Linear(4, 8), [8])
    assert isinstance(npu_layer, InputMajorLinear)
    assert npu_layer.weight.shape == (4, 8)


def test_the_plain_layout_gives_stocks_logits_too(checkpoint):
    stock, folder = checkpoint
    ids, mask = padded_batch([5, 2])
    model = tuned_model(folder, TuningOptions().replace(packed_weights=False))
    assert not model.is_packed()
    expected = stock_logits(stock, ids, mask, ids[:, :3])
    torch.testing.assert_close(tuned_logits(model, ids, mask, ids[:, :3]), expected, atol=1e-4, rtol=0)
