"""Wrong checkpoints are named and refused before any weight is in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import (
    assert_same_weights,
    config_of,
    edit_json,
    empty_model,
    load,
    one_line,
    weights_of,
    write_checkpoint,
)
from torch import Tensor

from npu_tuned_model import checkpoint_files
from npu_tuned_model.checkpoint import load_weights, unfused_state_dict
from npu_tuned_model.config import read_config
from npu_tuned_model.errors import CheckpointError

CPU = torch.device("cpu")
Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    write_checkpoint(folder, read_config(folder), [weights])


def refused(folder: Path) -> str:
    """The message with which loading is refused, before any weight is in place."""
    model = empty_model(read_config(folder))
    with pytest.raises(CheckpointError) as excinfo:
        load_weights(model, folder, dtype=torch.float32, device=CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    return one_line(excinfo)


def test_missing_weights_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {name: tensor for name, tensor in weights.items() if ".k_proj." not in name})
    message = refused(folder)
    assert "lacks weights" in message
    assert "layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.k_proj.weight" in message


def test_of_many_missing_weights_eight_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {"model.norm.weight": weights["model.norm.weight"]})
    message = refused(folder)
    assert f"... ({len(weights) - 1} in all)" in message
    assert message.count("model.") + message.count("lm_head") == 8


def test_left_over_weights_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, "model.layers.1.input_layernorm.weight": torch.ones(16)})
    message = refused(folder)
    assert "does not: model.layers.1.input_layernorm.weight" in message


def test_rotary_tables_of_old_checkpoints_are_ignored(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert_same_weights(unfused_state_dict(load(folder)), weights)


def test_a_wrong_shape_names_both_shapes(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, Q_WEIGHT: torch.zeros(8, 16)})
    message = refused(folder)
    assert f"{Q_WEIGHT} has shape (8, 16), config.json asks for (16, 16)" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(untied: tuple[Path, dict[str, Tensor]], dtype: torch.dtype) -> None:
    folder, weights = untied
    rewrite(folder, {**weights, Q_WEIGHT: weights[Q_WEIGHT].to(dtype)})
    message = refused(folder)
    assert f"{Q_WEIGHT} is of {dtype}: quantised" in message


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_a_type_that_no_weight_has_is_refused(tmp_path: Path, safe_serialization: bool) -> None:
    weights = {**weights_of(config_of()), Q_WEIGHT: torch.zeros(16, 16, dtype=torch.uint16)}
    folder = write_checkpoint(tmp_path, config_of(), [weights], safe_serialization)
    name = "U16" if safe_serialization else "torch.uint16"
    assert f"{Q_WEIGHT} is of {name}: quantised checkpoints are not supported" in refused(folder)


# files that are wrong


def test_a_folder_without_weights_is_refused(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    for file in folder.glob("model*"):
        file.unlink()
    assert "holds no weights: expected model.safetensors" in refused(folder)


def test_all_missing_shards_are_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    assert "shards are missing: model-00000.safetensors, model-00001.safetensors" in refused(folder)


@pytest.mark.parametrize("safe_serialization", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, safe_serialization: bool, kept: float) -> None:
    config = config_of()
    weights = weights_of(config)
    half = len(weights) // 2
    items = list(weights.items())
    folder = write_checkpoint(tmp_path, config, [dict(items[:half]), dict(items[half:])], safe_serialization)
    (file,) = folder.glob("*model-00001.*")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    message = refused(folder)
    assert f"{file} cannot be read, it is truncated or corrupt" in message
    assert message.endswith("download it again")


def test_a_git_lfs_pointer_is_recognised(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = untied
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    (folder / "model-00001.safetensors").write_text(pointer)
    assert refused(folder).endswith("is a Git LFS pointer, not the weights: run 'git lfs pull'")


def test_a_file_without_read_permission_is_not_called_damaged(
    untied: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by chmod: tests may run as root, whom no mode keeps out.
    monkeypatch.setattr(checkpoint_files, "safe_open", denied)
    assert refused(untied[0]).endswith("(PermissionError: [Errno 13] Permission denied): check its permissions")


def test_a_bin_file_that_is_no_table_of_tensors_is_refused(tmp_path: Path) -> None:
    config = config_of()
    folder = write_checkpoint(tmp_path, config, [weights_of(config)], safe_serialization=False)
    torch.save({"state_dict": weights_of(config)}, folder / "pytorch_model.bin")
    assert "is not a plain table of tensors" in refused(folder)


def test_a_bin_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    config = config_of()
    folder = write_checkpoint(tmp_path, config, [weights_of(config)], safe_serialization=False)
    torch.save({"weight": Path("/")}, folder / "pytorch_model.bin")
    assert "cannot be read" in refused(folder)


def change_weight_map(folder: Path, name: str, file: str | None) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    if file is None:
        del weight_map[name]
    else:
        weight_map[name] = file
    edit_json(index, weight_map=weight_map)


def test_a_tensor_that_its_shard_lacks_is_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    change_weight_map(untied[0], "model.layers.9.mlp.up_proj.weight", "model-00000.safetensors")
    message = refused(untied[0])
    assert "model-00000.safetensors lacks tensors that the index lists for it: model.layers.9.mlp.up_proj" in message


def test_a_tensor_that_the_index_does_not_list_is_named(untied: tuple[Path, dict[str, Tensor]]) -> None:
    change_weight_map(untied[0], Q_WEIGHT, None)
    message = refused(untied[0])
    assert f"model-00000.safetensors holds tensors that the index does not list for it: {Q_WEIGHT}" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_named(untied: tuple[Path, dict[str, Tensor]], content: str) -> None:
    (untied[0] / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(untied[0])
