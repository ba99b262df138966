"""LoRA adapters merged while loading, against PEFT's own merge of the same adapter into stock transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from models import padded_batch
from peft import LoraConfig, get_peft_model

from npu_tuned_model import UserError, load_model
from npu_tuned_model.lora import LoraAdapter

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "everywhere": {"target_modules": EVERYWHERE},
    "some": {"target_modules": ["v_proj", "down_proj"]},
    "rank_stabilised": {"target_modules": EVERYWHERE, "use_rslora": True},
    "patterns": {
        "target_modules": EVERYWHERE,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 32, "up_proj": 1},
    },
}


def adapted(stock, folder: Path, **settings):
    """Save a random adapter for `stock` in `folder`; returns stock with it merged in by PEFT."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
    model = get_peft_model(copy.deepcopy(stock), config)
    model.save_pretrained(folder)
    return model.merge_and_unload()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", ["gqa_14_2_head_64", "gqa_4_2_head_16"])
def test_tokens_are_those_of_pefts_merge(checkpoints, tmp_path, shape, settings):
    stock, folder = checkpoints[shape]
    merged = adapted(stock, tmp_path, **SETTINGS[settings])
    tuned = load_model(folder, device="cpu", dtype="float32", lora=tmp_path)
    ids, mask = padded_batch([9, 4, 13])
    expected = merged(ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(tuned(ids, attention_mask=mask).logits[:, -1], expected, rtol=0, atol=1e-4)
    assert (expected - stock(ids, attention_mask=mask).logits[:, -1]).abs().max() > 0.1  # the adapter does something
    arguments = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(tuned.generate(ids, **arguments), merged.generate(ids, **arguments))


def test_bfloat16_weights_are_pefts_to_the_bit(checkpoints, tmp_path):
    stock, folder = checkpoints["gqa_4_2_head_16"]
    merged = adapted(copy.deepcopy(stock).bfloat16(), tmp_path, target_modules=EVERYWHERE)
    tuned = load_model(folder, device="cpu", dtype="bfloat16", lora=tmp_path)
    gate_up = tuned.model.layers[1].mlp.gate_up_proj.dense_weight()
    layer = merged.model.layers[1].mlp
    assert torch.equal(gate_up, torch.cat([layer.gate_proj.weight, layer.up_proj.weight]))


def test_a_part_of_the_change_is_that_part_of_the_whole(checkpoints, tmp_path):
    adapted(checkpoints["gqa_4_2_head_16"][0], tmp_path, target_modules=EVERYWHERE)
    adapter = LoraAdapter(tmp_path)
    for child, shape in (("self_attn.o_proj", (64, 64)), ("mlp.down_proj", (64, 96)), ("mlp.up_proj", (96, 64))):
        name = f"model.layers.0.{child}.weight"
        whole = adapter.change(name, 0, 0, shape[0])
        for dim in (0, 1):
            part = adapter.change(name, dim, 32, 16)
            torch.testing.assert_close(part, whole.narrow(dim, 32, 16))
    assert adapter.change("model.norm.weight", 0, 0, 64) is None


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "describes a IA3 adapter; only LORA ones"),
        ({"use_dora": True}, "sets use_dora to True, which can't be merged here"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"bias": "all"}, "sets bias to 'all'"),
        ({"r": 0}, "needs positive numbers for r and lora_alpha"),
    ],
)
def test_adapters_that_cannot_be_merged(checkpoints, tmp_path, changes, message):
    stock, folder = checkpoints["gqa_4_2_head_16"]
    adapted(stock, tmp_path, target_modules=["q_proj"])
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_model(folder, device="cpu", lora=tmp_path)


def test_an_adapter_of_another_model(checkpoints, tmp_path):
    adapted(checkpoints["gqa_14_2_head_64"][0], tmp_path, target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"is of another model: model\.layers\.0\.self_attn\.q_proj\.weight is"):
        load_model(checkpoints["gqa_4_2_head_16"][1], device="cpu", lora=tmp_path)


def test_no_adapter_there(checkpoints, tmp_path):
    with pytest.raises(UserError, match="is no LoRA adapter"):
        load_model(checkpoints["gqa_4_2_head_16"][1], device="cpu", lora=tmp_path)
    edit = tmp_path / "adapter_config.json"
    edit.write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    with pytest.raises(UserError, match=r"neither adapter_model\.safetensors nor"):
        load_model(checkpoints["gqa_4_2_head_16"][1], device="cpu", lora=tmp_path)
