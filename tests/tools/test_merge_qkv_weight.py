"""tools/merge_qkv_weight.py: bit for bit there and back, whole or not at all; a line per mistake."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import config_of, edit_json, weights_of, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config

from npu_tuned_model import checkpoint_rows, load_model
from npu_tuned_model.checkpoint_convert import Conversion
from npu_tuned_model.checkpoint_files import WeightSource
from npu_tuned_model.errors import CheckpointError
from tools.merge_qkv_weight import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def convert(*arguments: object) -> Outcome:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main.main([str(argument) for argument in arguments])
    code = stop.value.code
    return Outcome(code if isinstance(code, int) else 1, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    outcome = convert(*arguments)
    assert outcome.code != 0
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in WeightSource(folder)}


def stored_weights(config: Qwen2Config, dtype: torch.dtype) -> dict[str, Tensor]:
    """As a checkpoint holds them: a tied output layer has no weight of its own."""
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(config).items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two shards, with q and v of a layer in different ones, and the small files of a real checkpoint."""
    weights = weights_of(config_of())
    names = sorted(weights, key=lambda name: (".v_proj." in name, name))
    shards = [{name: weights[name] for name in part} for part in (names[:-3], names[-3:])]
    folder = write_checkpoint(tmp_path / "plain", config_of(), shards)
    for name in ("tokenizer.json", "merges.txt", "generation_config.json", "NOTICE"):
        (folder / name).write_text(f"{{}} {name}")
    (folder / ".hidden").mkdir()
    (folder / "old.bin").write_bytes(b"weights of another kind")
    return folder


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


# there and back


@given(
    groups=st.sampled_from([(4, 4, 2), (4, 2, 2), (4, 1, 2), (8, 2, 4), (6, 3, 3), (4, 2, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tied=st.booleans(),
    safe_serialization=st.booleans(),
    shards=st.integers(1, 4),
    shard_size=st.sampled_from(["1KB", "3 kb", "1GB"]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unmerging_gives_the_original_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    groups: tuple[int, int, int],
    dtype: torch.dtype,
    tied: bool,
    safe_serialization: bool,
    shards: int,
    shard_size: str,
) -> None:
    heads, kv_heads, size = groups
    config = config_of(heads, kv_heads, tied=tied)
    weights = stored_weights(config, dtype)
    items = list(weights.items())
    work = tmp_path_factory.mktemp("round")
    write_checkpoint(
        work / "plain", config, [dict(items[start::shards]) for start in range(shards)], safe_serialization
    )
    there = convert(
        f"--model_path={work / 'plain'}", f"--output_path={work / 'there'}", f"--tp_size={size}", "--verify",
        f"--max_shard_size={shard_size}",
    )  # fmt: skip
    assert there.code == 0, there.err
    assert "all equal" in there.out
    back = convert(f"--model_path={work / 'there'}", f"--output_path={work / 'back'}", "--unmerge", "--verify")
    assert back.code == 0, back.err
    found = tensors_of(work / "back")
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name
    original, config_back = (json.loads((work / name / "config.json").read_text()) for name in ("plain", "back"))
    assert config_back == original
    shutil.rmtree(work)


def test_the_result_holds_fused_weights_and_all_small_files(plain: Path, tmp_path: Path) -> None:
    outcome = convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--tp_size=2")
    assert outcome.code == 0, outcome.err
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [
        "NOTICE",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "merges.txt").read_text() == "{} merges.txt"
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert not any(part in name for name in names for part in ("q_proj", "k_proj", "v_proj", "gate_proj", ".up_proj"))
    assert "model.layers.1.self_attn.qkv.bias" in names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["npu_tuned_layout"] == {"version": 1, "tp_size": 2}
    assert (plain / "config.json").read_text() != (tmp_path / "out" / "config.json").read_text()


def test_shards_stay_within_the_size_and_are_in_the_index(plain: Path, tmp_path: Path) -> None:
    assert convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--max_shard_size=4KB").code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 4000 or len(tensors) == 1
        assert {name for name, holder in index["weight_map"].items() if holder == file.name} == set(tensors)
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in files for tensor in load_file(file).values()
    )


def test_a_checkpoint_for_one_rank_loads_as_the_plain_one(plain: Path, tmp_path: Path) -> None:
    (plain / "generation_config.json").unlink()
    assert convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}").code == 0
    model = load_model(tmp_path / "out", device="cpu", dtype="float32")
    model.save_pretrained(tmp_path / "saved")
    saved, expected = tensors_of(tmp_path / "saved"), tensors_of(plain)
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    assert "npu_tuned_layout" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_weights_can_be_cast(plain: Path, tmp_path: Path) -> None:
    outcome = convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--dtype=bfloat16", "--verify")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found, expected = tensors_of(tmp_path / "out"), tensors_of(plain)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    gate, up = (expected[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up"))
    assert torch.equal(found["model.layers.0.mlp.gate_up_proj.weight"], torch.cat([gate, up]).bfloat16())


def test_tensors_of_old_checkpoints_are_kept(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = {**tensors_of(plain), name: torch.tensor([1.0, 0.1])}
    shutil.rmtree(plain)
    write_checkpoint(plain, config_of(), [weights])
    assert convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--verify").code == 0
    assert torch.equal(tensors_of(tmp_path / "out")[name], weights[name])
    load_model(tmp_path / "out", device="cpu")


@pytest.mark.parametrize(
    "damaged", ["model.layers.1.self_attn.qkv.bias", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_verify_finds_one_wrong_bit(plain: Path, tmp_path: Path, damaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Conversion.write

    def write_and_damage(self: Conversion, *arguments: object) -> None:
        write(self, *arguments)
        file = tmp_path / "out" / "model.safetensors"
        tensors = load_file(file)
        tensors[damaged].view(-1).view(torch.uint8)[-4] ^= 1
        save_file(tensors, file)

    monkeypatch.setattr(Conversion, "write", write_and_damage)
    message = refused(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--tp_size=2", "--verify")
    assert f"{damaged} differs from {plain}" in message


def test_weights_of_a_part_in_another_dtype_become_the_first_ones(plain: Path, tmp_path: Path) -> None:
    weights = {
        name: tensor.double() if ".k_proj." in name else tensor.bfloat16() for name, tensor in tensors_of(plain).items()
    }
    shutil.rmtree(plain)
    write_checkpoint(plain, config_of(), [weights])
    outcome = convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--verify")
    assert outcome.code == 0, outcome.err
    parts = [weights[f"model.layers.0.self_attn.{letter}_proj.weight"].bfloat16() for letter in "qkv"]
    found = tensors_of(tmp_path / "out")["model.layers.0.self_attn.qkv.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.cat(parts))


# copying


@pytest.mark.parametrize("piece", [1, 7, 32, 1000])
def test_the_size_of_the_pieces_copied_makes_no_difference(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    Conversion(plain, whole, tp_size=2, max_shard_bytes=4000).write()
    monkeypatch.setattr(checkpoint_rows, "_COPIED_BYTES", piece)
    monkeypatch.setattr(checkpoint_rows, "_REPORTED_BYTES", 500)
    conversion = Conversion(plain, pieces, tp_size=2, max_shard_bytes=4000)
    reported: list[int] = []
    conversion.write(reported.append)
    assert sum(reported) == conversion.total_bytes
    assert max(reported) < 500 + piece
    files = sorted(file.name for file in whole.iterdir())
    assert files == sorted(file.name for file in pieces.iterdir())
    for name in files:
        assert (whole / name).read_bytes() == (pieces / name).read_bytes(), name


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_source_that_shrinks_while_it_is_read_is_named(plain: Path, tmp_path: Path, dtype: str | None) -> None:
    conversion = Conversion(plain, tmp_path / "out", dtype=dtype, max_shard_bytes=10**9)
    file = plain / "model-00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors ended early, it was changed"):
        conversion.write()
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


# what the command has to import takes longer than copying a small model
IMPORTED = """
import sys
from tools.merge_qkv_weight import main
main(sys.argv[1:], standalone_mode=False)
print(sorted({"torch", "transformers"}.intersection(sys.modules)))
"""


@pytest.mark.parametrize(
    ("options", "imported"),
    [
        (["--tp_size=2", "--max_shard_size=4KB"], []),
        (["--dtype=float32"], []),  # as they are stored
        (["--dtype=bfloat16"], ["torch"]),
        (["--verify"], ["torch"]),
    ],
)
def test_torch_is_imported_only_to_change_or_compare(
    plain: Path, tmp_path: Path, options: list[str], imported: list[str]
) -> None:
    def imports(*arguments: object) -> str:
        command = [sys.executable, "-c", IMPORTED, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()[-1]

    assert imports(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", *options) == str(imported)
    if not imported:
        back = imports(f"--model_path={tmp_path / 'out'}", f"--output_path={tmp_path / 'back'}", "--unmerge")
        assert back == "[]"


# mistakes


def test_an_output_that_exists_is_only_replaced_with_force(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    assert "exists: take another --output_path, or --force" in refused(f"--model_path={plain}", f"--output_path={out}")
    assert (out / "precious").read_text() == "data"
    assert convert(f"--model_path={plain}", f"--output_path={out}", "--force").code == 0
    assert not (out / "precious").exists()
    assert (out / "config.json").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("place", ["plain", "plain/inside", ".", "../{name}/plain", "link"])
def test_input_and_output_may_not_overlap(plain: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(plain)
    output = tmp_path / place.format(name=tmp_path.name)
    message = refused(f"--model_path={plain}", f"--output_path={output}", "--force")
    assert "overlap: take another --output_path" in message
    assert len(tensors_of(plain)) == 27


def test_an_output_that_is_a_file_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert "is a file" in refused(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--force")


def test_a_converted_checkpoint_is_not_converted_again(plain: Path, tmp_path: Path) -> None:
    convert(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--tp_size=2")
    message = refused(f"--model_path={tmp_path / 'out'}", f"--output_path={tmp_path / 'again'}", "--tp_size=4")
    assert "already converted, for tp_size 2: convert the plain checkpoint, or get it back with --unmerge" in message


def test_a_plain_checkpoint_is_not_unmerged(plain: Path, tmp_path: Path) -> None:
    assert "there is nothing to unmerge" in refused(
        f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--unmerge"
    )


@pytest.mark.parametrize("option", ["--tp_size=2", "--dtype=float16"])
def test_unmerging_takes_no_options_that_it_knows_itself(plain: Path, tmp_path: Path, option: str) -> None:
    assert f"--unmerge takes no {option.partition('=')[0]}" in refused(
        f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--unmerge", option
    )


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tp_size=3", "4 attention heads over 3 ranks; sizes that work: 1, 2, 4"),
        ("--tp_size=0", "--tp_size"),
        ("--max_shard_size=much", "'much' is no size; write 5GB"),
        ("--max_shard_size=0", "'0' is no size"),
        ("--dtype=int8", "int8"),
    ],
)
def test_wrong_options_are_refused(plain: Path, tmp_path: Path, option: str, words: str) -> None:
    assert words in refused(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", option)
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named(plain: Path, tmp_path: Path) -> None:
    (plain / "model-00001.safetensors").unlink()
    assert "shards are missing: model-00001.safetensors" in refused(
        f"--model_path={plain}", f"--output_path={tmp_path / 'out'}"
    )
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    edit_json(plain / "config.json", num_key_value_heads=4)
    assert "k_proj.bias has shape (8,), config.json asks for (16,)" in refused(
        f"--model_path={plain}", f"--output_path={tmp_path / 'out'}"
    )


# interruptions


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10))
    assert "its disk has 0.0 GB left" in refused(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}")
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_half_way_leaves_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = checkpoint_rows._write_all, []

    def full(stream: io.FileIO, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, data)

    monkeypatch.setattr(checkpoint_rows, "_write_all", full)
    message = refused(f"--model_path={plain}", f"--output_path={tmp_path / 'out'}")
    assert "can't be written (No space left on device), nothing is left of it" in message
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_a_failed_replacement_keeps_what_was_there(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    rename = os.rename

    def fail_into_place(source: Path, target: Path) -> None:
        if Path(target) == out and not str(source).endswith("-replaced"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_into_place)
    assert "can't be written" in refused(f"--model_path={plain}", f"--output_path={out}", "--force")
    assert (out / "precious").read_text() == "data"
    assert leftovers(tmp_path) == []
