"""Tiny checkpoints on disk, whole, sharded at will or damaged, and the empty model that they are loaded into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import stock_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.modeling_utils import no_init_weights

from npu_tuned_model import Qwen2ForCausalLM
from npu_tuned_model.checkpoint import load_weights
from npu_tuned_model.config import read_config
from npu_tuned_model.errors import UserError


def config_of(heads: int = 4, kv_heads: int = 2, head_dim: int = 4, layers: int = 2, tied: bool = False) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=40,
        hidden_size=heads * head_dim,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def empty_model(config: Qwen2Config) -> nn.Module:
    """The tuned model on the meta device, as load_weights expects it."""
    with torch.device("meta"), no_init_weights():
        return Qwen2ForCausalLM(config)


def write_checkpoint(
    folder: Path, config: Qwen2Config, shards: list[dict[str, Tensor]], safe_serialization: bool = True
) -> Path:
    """One file per element of `shards`, with an index when there is more than one, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    whole = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    stem, suffix = whole.split(".")
    weight_map = {}
    for number, shard in enumerate(shards):
        name = whole if len(shards) == 1 else f"{stem}-{number:05d}.{suffix}"
        if safe_serialization:
            save_file({key: tensor.clone() for key, tensor in shard.items()}, str(folder / name))
        else:
            torch.save({key: tensor.clone() for key, tensor in shard.items()}, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        (folder / f"{whole}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON object on disk; `...` removes the key."""
    value = json.loads(path.read_text())
    for key, new in changes.items():
        if new is ...:
            del value[key]
        else:
            value[key] = new
    path.write_text(json.dumps(value))


def load(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: object) -> nn.Module:
    model = empty_model(read_config(folder))
    load_weights(model, folder, dtype=dtype, device=torch.device("cpu"), **kwargs)
    return model


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def weights_of(config: Qwen2Config) -> dict[str, Tensor]:
    """Random weights by name as transformers keeps them; lm_head is listed also when it is tied."""
    return dict(stock_model(config).state_dict())


def one_line(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(excinfo.value)
    assert isinstance(excinfo.value, UserError)
    assert "\n" not in message
    return message
