"""A checkpoint of Qwen2-0.5B's shape with made-up weights, for those who have no checkpoint at hand.

The weights are random, so the text means nothing; the work per token is that of Qwen2-0.5B. They are not plain
noise, though: plain noise puts its best tokens so close together that rounding decides between them, and two correct
implementations would soon write different texts. Here the first feed-forward layer is a linear associative memory
(Kohonen 1972, Hebbian sum of outer products) that maps each byte token to two successors, far ahead of all other
tokens; which of the two wins is decided by the noise of all the other layers, and so by the whole context.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable

import platformdirs
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from npu_tuned_model.errors import UserError

# of a few seeds tried, the one whose best tokens are never close together in the default workload
SEED = 1
NAME = f"qwen2-0.5b-shape-seed{SEED}"
END_OF_TEXT = "<|endoftext|>"
# Qwen2-0.5B's config.json, but for max_position_embeddings (131072 there).
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 24,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}

_BYTES = 256
_MEMORY_GAIN = 4.0  # length of each planted successor, in lengths of an embedding
_FIRST = 1.2  # the first successor's advantage over the second: the noise overturns it now and then, seldom narrowly
_NOISE = 0.02  # what each half layer adds to the residual stream, per element


def sample_checkpoint(on_build: Callable[[Path], None] = lambda folder: None) -> Path:
    """The sample checkpoint in the user's cache folder; built the first time, which takes about half a minute.

    Args:
        on_build: called with the folder before building, not when the checkpoint is there already.

    Raises:
        UserError: when the cache folder can't be written.
    """
    folder = Path(platformdirs.user_cache_dir("npu-tuned-qwen2")) / NAME
    if folder.is_dir():
        return folder
    on_build(folder)
    try:
        build(folder)
    except OSError as error:
        raise UserError(
            f"the sample checkpoint (1 GB) can't be written to {folder}: {error.strerror or error}; make room, set "
            "XDG_CACHE_HOME to another folder, or pass --model_path"
        ) from error
    return folder


def build(folder: Path, *, overrides: dict[str, Any] | None = None, seed: int = SEED) -> None:
    """Write a checkpoint to `folder`, which appears only when it is complete.

    Args:
        overrides: entries of CONFIG to change.

    Raises:
        OSError: when it can't be written.
    """
    config = {**CONFIG, **(overrides or {})}
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (work / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        _write_tokenizer(work, config["eos_token_id"])
        try:
            save_file(make_weights(config, seed), str(work / "model.safetensors"), metadata={"format": "pt"})
        except Exception as error:
            # safetensors reports a full disk as an error of its own
            raise OSError(str(error)) from error
        work.chmod(0o755)
        try:
            os.rename(work, folder)
        except OSError:
            if not folder.is_dir():  # else another process has finished the same checkpoint first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The bfloat16 state dict, named as in a Hugging Face checkpoint; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(std).to(torch.bfloat16)

    embedding = normal(config["vocab_size"], hidden, std=config["initializer_range"])
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = embedding.clone()
    unit = 1.0 / math.sqrt(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        # no bias on the values: it would add the same vector for every token and drown what differs between them
        for name, rows, bias in (("q", hidden, 0.1), ("k", kv_width, 0.1), ("v", kv_width, 0.0)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, hidden, std=unit)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=bias)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(hidden, hidden, std=2 * _NOISE * unit)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(inner, hidden, std=unit)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(inner, hidden, std=unit)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(hidden, inner, std=2 * _NOISE / math.sqrt(inner))
        for name in ("input", "post_attention"):
            weights[f"{prefix}{name}_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    _plant_successors(weights, config["rms_norm_eps"])
    return weights


def _plant_successors(weights: dict[str, Tensor], eps: float) -> None:
    tokens = torch.arange(_BYTES)
    embedding = weights["model.embed_tokens.weight"][:_BYTES].float()
    normed = embedding * torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + eps)
    prefix = "model.layers.0.mlp."
    gate, up = (normed @ weights[f"{prefix}{name}_proj.weight"].float().t() for name in ("gate", "up"))
    keys = F.silu(gate) * up
    # multiplier 1 mod 4 and odd increments: each of the two maps alone walks through all bytes before it repeats
    values = _FIRST * embedding[(5 * tokens + 17) % _BYTES] + embedding[(5 * tokens + 93) % _BYTES]
    memory = (_MEMORY_GAIN * values / keys.pow(2).sum(-1, keepdim=True)).t() @ keys
    weights[f"{prefix}down_proj.weight"] = memory.to(torch.bfloat16)


def _write_tokenizer(folder: Path, end_of_text: int) -> None:
    vocabulary = {symbol: token for token, symbol in enumerate(_byte_symbols())}
    vocabulary[END_OF_TEXT] = end_of_text
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(end_of_text): {"content": END_OF_TEXT, **special}},
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONFIG["max_position_embeddings"],
        "errors": "replace",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _byte_symbols() -> list[str]:
    """One printable character per byte value, as byte-level BPE vocabularies write them (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(_BYTES)]
