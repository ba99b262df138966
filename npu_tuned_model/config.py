"""Find a checkpoint's folder and read its config.json: what of it the tuned model can run, and why not the rest."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import huggingface_hub

from npu_tuned_model.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import Qwen2Config

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# what Qwen2Config takes where config.json says nothing
_SLIDING_WINDOW = 4096


@dataclass(frozen=True)
class ModelSizes:
    """What of a configuration decides which tensors a checkpoint has; named as in Qwen2Config.

    Files can be planned and converted with it where importing transformers would take most of the time.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool = False
    npu_tuned_layout: Any = None


AnyConfig = Union[ModelSizes, "Qwen2Config"]


def resolve_checkpoint(path: str | Path) -> Path:
    """The local folder of a checkpoint: `path` itself, or the download of the Hub model `path` names ("owner/name").

    Only configuration, tokenizer and safetensors files are fetched; pytorch_model*.bin when there are no safetensors.

    Raises:
        CheckpointError: `path` is a file, or neither a folder nor a model that can be fetched.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path} is a file: give the folder that holds config.json and the weights")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
        raise CheckpointError(f"{path} does not exist: give a local folder or the id of a Hub model (owner/name)")

    def fetch(*patterns: str) -> Path:
        return Path(
            huggingface_hub.snapshot_download(str(path), allow_patterns=list(patterns), ignore_patterns=["*/*"])
        )

    try:
        fetched = fetch("*.json", "merges.txt", "*.safetensors")
        if not any(fetched.glob("*.safetensors")):
            fetched = fetch("pytorch_model*.bin")
    # What a failed download raises depends on the hub client's version and its HTTP library; all of it means the same.
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a local folder and could not be fetched from the Hub ({first_line(error)}): "
            "check the name, the network and your access rights, or give a local folder"
        ) from error
    return fetched


def read_config(folder: Path) -> Qwen2Config:
    """The configuration of a checkpoint the tuned model can run.

    Newer transformers write `dtype` and `rope_parameters` where 4.37 reads `torch_dtype` and `rope_theta`; both are
    understood, so that such a checkpoint does not run with the default rope base.

    Raises:
        CheckpointError: config.json is missing or damaged, or describes something else than a plain dense Qwen2.
    """
    path = _config_file(folder)
    return config_from(path, read_json(path))


def read_sizes(folder: Path) -> ModelSizes:
    """As `read_config`, of the same checkpoints and with the same errors, without transformers."""
    path = _config_file(folder)
    raw = read_json(path)
    _check(path, raw)
    return ModelSizes(**{field.name: raw[field.name] for field in fields(ModelSizes) if field.name in raw})


def _config_file(folder: Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder that holds config.json and the weights")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give the folder of a Hugging Face checkpoint")
    return path


def config_from(path: Path, raw: dict[str, Any]) -> Qwen2Config:
    """As `read_config`, of the contents of a config.json; `path` is named in errors."""
    _check(path, raw)
    from transformers import Qwen2Config

    return Qwen2Config.from_dict(_as_transformers_4_37(raw))


def _check(path: Path, raw: dict[str, Any]) -> None:
    """Raise CheckpointError unless the tuned model can run what a config.json describes."""
    model_type = raw.get("model_type")
    if model_type != "qwen2":
        reason = "mixture-of-experts is not supported, " if model_type == "qwen2_moe" else ""
        raise CheckpointError(f"{path}: model_type is {model_type!r}: {reason}use a dense checkpoint of type 'qwen2'")
    if raw.get("quantization_config") is not None:
        raise CheckpointError(f"{path}: quantization_config is present: use the unquantised checkpoint")
    if raw.get("rope_scaling") is not None:
        raise CheckpointError(
            f"{path}: rope_scaling is {raw['rope_scaling']!r}, which is not supported: set it to null and keep prompts "
            "within max_position_embeddings"
        )
    _check_sizes(path, raw)
    rope = raw.get("rope_parameters")
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default" and "rope_theta" in rope
    if rope is not None and not plain:
        raise CheckpointError(
            f"{path}: rope_parameters is {rope!r}, only rope_type 'default' with a rope_theta is supported"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{path}: hidden_act is {activation!r}, only 'silu' is supported")
    window, longest = raw.get("sliding_window", _SLIDING_WINDOW), raw["max_position_embeddings"]
    if raw.get("use_sliding_window", False) and window is not None and window < longest:
        raise CheckpointError(
            f"{path}: sliding window attention is on (window {window}, max_position_embeddings {longest}) and not "
            f"supported: set use_sliding_window to false if prompts and answers together stay below {window} tokens"
        )
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim, rest = divmod(raw["hidden_size"], heads)
    if rest:
        raise CheckpointError(f"{path}: hidden_size {raw['hidden_size']} is not divisible by {heads} attention heads")
    if raw.get("head_dim") not in (None, head_dim):
        raise CheckpointError(
            f"{path}: head_dim is {raw['head_dim']}, only hidden_size / num_attention_heads = {head_dim} is supported"
        )
    if heads % kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")


def _check_sizes(path: Path, raw: dict[str, Any]) -> None:
    # A size that is left out would silently become that of another model: the default of Qwen2Config.
    for key in _SIZES:
        value = raw.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive whole number")


def _as_transformers_4_37(raw: dict[str, Any]) -> dict[str, Any]:
    # 4.37 takes a quantization_config for present even where it is null.
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    if "dtype" in raw:
        raw.setdefault("torch_dtype", raw.pop("dtype"))
    rope = raw.pop("rope_parameters", None)
    if rope is not None:
        raw["rope_theta"] = rope["rope_theta"]
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({first_line(error)}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object: download it again")
    return value


def first_line(error: BaseException) -> str:
    """An error of a library in one line, for a message of our own."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
