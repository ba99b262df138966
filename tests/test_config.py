"""config.py: which config.json the tuned model runs, and which folder a name means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import huggingface_hub
import pytest
import torch
from checkpoints import (
    config_of,
    edit_json,
    one_line,
)
from transformers import Qwen2Config

from npu_tuned_model.config import ModelSizes, read_config, read_sizes, resolve_checkpoint
from npu_tuned_model.errors import CheckpointError

# the two must refuse the same
both_readers = pytest.mark.parametrize("read", [read_config, read_sizes])
Reader = Callable[[Path], object]


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    config_of(heads=4, kv_heads=2, head_dim=4).save_pretrained(tmp_path)
    return tmp_path


def test_a_good_config_is_read(config_folder: Path) -> None:
    edit_json(config_folder / "config.json", torch_dtype="bfloat16", rope_theta=5e5, rope_scaling=None)
    config = read_config(config_folder)
    assert isinstance(config, Qwen2Config)
    assert (config.hidden_size, config.num_key_value_heads, config.rope_theta) == (16, 2, 5e5)
    assert config.torch_dtype == torch.bfloat16


def test_keys_of_newer_transformers_are_understood(config_folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    edit_json(config_folder / "config.json", dtype="bfloat16", rope_theta=..., rope_parameters=rope)
    config = read_config(config_folder)
    assert config.rope_theta == 1e6
    assert config.torch_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": ...},
        {"npu_tuned_layout": {"version": 1, "tp_size": 2}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_the_sizes_are_those_of_the_whole_configuration(config_folder: Path, changes: dict[str, object]) -> None:
    edit_json(config_folder / "config.json", **changes)
    sizes, config = read_sizes(config_folder), read_config(config_folder)
    for field in fields(ModelSizes):
        assert getattr(sizes, field.name) == getattr(config, field.name, None), field.name


@both_readers
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": "qwen2_moe"}, "mixture-of-experts is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is {'type': 'yarn', 'factor': 4.0}"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "only rope_type 'default'"),
        ({"rope_parameters": {"rope_type": "default"}}, "only rope_type 'default' with a rope_theta"),
        ({"use_sliding_window": True, "sliding_window": 63}, "set use_sliding_window to false if prompts"),
        ({"use_sliding_window": True, "sliding_window": ..., "max_position_embeddings": 4097}, "(window 4096,"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is present"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"hidden_size": 18}, "hidden_size 18 is not divisible by 4 attention heads"),
        ({"head_dim": 8}, "head_dim is 8, only hidden_size / num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive whole number"),
        ({"vocab_size": "40"}, "vocab_size is '40'"),
        ({"intermediate_size": ...}, "intermediate_size is None"),
    ],
)
def test_a_config_that_the_model_cannot_run_is_refused(
    config_folder: Path, read: Reader, changes: dict[str, object], message: str
) -> None:
    edit_json(config_folder / "config.json", **changes)
    with pytest.raises(CheckpointError) as excinfo:
        read(config_folder)
    assert message in one_line(excinfo)
    assert str(config_folder / "config.json") in one_line(excinfo)


@both_readers
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": ..., "max_position_embeddings": 4096},
        {"head_dim": 4},
        {"quantization_config": None},
    ],
)
def test_a_harmless_setting_is_accepted(config_folder: Path, read: Reader, changes: dict[str, object]) -> None:
    edit_json(config_folder / "config.json", **changes)
    assert read(config_folder).hidden_size == 16


@both_readers
@pytest.mark.parametrize("content", ["", "{", "[1]", "\ufeff{}"])
def test_a_damaged_config_is_refused(config_folder: Path, read: Reader, content: str) -> None:
    (config_folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json .*download it again") as excinfo:
        read(config_folder)
    one_line(excinfo)


@both_readers
def test_a_missing_folder_or_config_is_refused(tmp_path: Path, read: Reader) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read(tmp_path / "nowhere")


# Hub


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked for a local folder")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_checkpoint("owner/name") == Path("owner/name")
    assert resolve_checkpoint(tmp_path) == tmp_path
    for wrong in (tmp_path / "nowhere", "nowhere", "a/b/c", "./owner/nothing", "../nothing"):
        with pytest.raises(CheckpointError, match="give a local folder or the id of a Hub model"):
            resolve_checkpoint(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint("file")


class FakeHub:
    """Stands in for the hub: what matches the patterns asked for appears in the local folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files, self.calls = folder, files, 0

    def __call__(self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repo_id == "owner/name-2.5"
        self.calls += 1
        for file in huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (self.folder / str(file)).touch()
        return str(self.folder)


SMALL_FILES = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "vocab.json"]
UNWANTED = ["README.md", "optimizer.bin", "training_args.bin", "original/model.safetensors"]


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model-00001-of-00001.bin"], ["pytorch_model-00001-of-00001.bin"]),
    ],
)
def test_the_hub_is_asked_for_no_more_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str], fetched: list[str]
) -> None:
    hub = FakeHub(tmp_path, SMALL_FILES + UNWANTED + weights)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_checkpoint("owner/name-2.5") == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(SMALL_FILES + fetched)


@pytest.mark.parametrize(
    "error", [OSError("no route\nto host"), huggingface_hub.errors.LocalEntryNotFoundError("offline"), KeyError()]
)
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="owner/name is not a local folder and could not be fetched") as excinfo:
        resolve_checkpoint("owner/name")
    assert type(error).__name__ in one_line(excinfo)
    assert excinfo.value.__cause__ is error
