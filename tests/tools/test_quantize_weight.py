"""tools/quantize_weight.py: half the bytes, the weights that quantising while loading gives; a line per mistake."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, edit_json, weights_of, write_checkpoint
from safetensors.torch import load_file, save_file

from npu_tuned_model import UserError, load_model
from npu_tuned_model.checkpoint_files import WeightSource
from npu_tuned_model.config import read_json
from npu_tuned_model.tensor_parallel import TensorParallel
from tools.merge_qkv_weight import main as merge
from tools.quantize_weight import main as quantise


def run(command, *arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        command.main([str(argument) for argument in arguments])
    code = stop.value.code
    return (code if isinstance(code, int) else 1), out.getvalue(), err.getvalue()


def refused(command, *arguments: object) -> str:
    code, _, err = run(command, *arguments)
    assert code != 0
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    weights = list(weights_of(config_of()).items())
    folder = write_checkpoint(tmp_path / "plain", config_of(), [dict(weights[::2]), dict(weights[1::2])])
    (folder / "merges.txt").write_text("merges")
    return folder


@pytest.fixture
def written(plain: Path, tmp_path: Path) -> Path:
    code, out, err = run(quantise, f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", "--verify")
    assert (code, err) == (0, "")
    assert "compared, all equal" in out
    return tmp_path / "out"


def test_what_is_written(plain, written):
    tensors = WeightSource(written).tensors
    name = "model.layers.0.self_attn.qkv"
    assert tensors[f"{name}.weight"].dtype.name == "int8"
    assert tensors[f"{name}.weight_scale"].dtype.name == "bfloat16"
    assert tensors[f"{name}.bias"].dtype.name == "float32"
    assert tensors["lm_head.weight"].dtype.name == "int8"
    assert read_json(written / "config.json")["npu_tuned_layout"] == {
        **{"version": 1, "tp_size": 1},
        **{"weight_dtype": "int8", "int8_embeddings": True},
    }
    assert (written / "merges.txt").read_text() == "merges"


@pytest.mark.parametrize("embeddings", [True, False])
def test_it_loads_as_one_quantised_while_loading(plain, tmp_path, embeddings):
    switch = "--int8_embeddings" if embeddings else "--no_int8_embeddings"
    assert run(quantise, f"--model_path={plain}", f"--output_path={tmp_path / 'out'}", switch)[0] == 0
    arguments = {"device": "cpu", "dtype": "bfloat16"}
    models = [
        load_model(tmp_path / "out", **arguments),
        load_model(tmp_path / "out", weight_dtype="int8", **arguments),
        load_model(plain, weight_dtype="int8", int8_embeddings=embeddings, **arguments),
    ]
    ids = torch.arange(2, 12)[None]
    logits = [model(ids).logits for model in models]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert type(models[0].lm_head) is type(models[2].lm_head)


def test_a_change_is_found(plain, written, tmp_path):
    from npu_tuned_model.checkpoint_convert import verify

    file = written / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj\.weight differs"):
        verify(plain, written)


def test_mistakes(plain, written, tmp_path):
    out = f"--output_path={tmp_path / 'other'}"
    assert "exists: take another" in refused(quantise, f"--model_path={plain}", f"--output_path={written}")
    for command, more in ((quantise, ()), (merge, ()), (merge, ("--unmerge",))):
        message = refused(command, f"--model_path={written}", out, *more)
        assert "already converted, to int8 for tp_size 1: convert the plain checkpoint" in message
    assert "tp_size 3 does not divide" in refused(quantise, f"--model_path={plain}", out, "--tp_size=3")
    assert run(merge, f"--model_path={plain}", out)[0] == 0
    again = f"--output_path={tmp_path / 'again'}"
    assert "already converted, for tp_size 1" in refused(quantise, f"--model_path={tmp_path / 'other'}", again)


def test_another_number_of_ranks(written):
    parallel = TensorParallel(0, 2, lambda tensor: tensor)
    with pytest.raises(UserError, match=r"for tp_size 1, this run has tp_size 2: .* tools/quantize_weight\.py .*=2"):
        load_model(written, device="cpu", parallel=parallel)


def test_integers_that_config_json_does_not_announce(written):
    edit_json(written / "config.json", npu_tuned_layout={"version": 1, "tp_size": 1})
    with pytest.raises(UserError, match=r"has weights that the model of its config\.json does not"):
        load_model(written, device="cpu")


def test_an_announcement_without_integers(plain):
    layout = {"version": 1, "tp_size": 1, "weight_dtype": "int8", "int8_embeddings": True}
    assert run(merge, f"--model_path={plain}", f"--output_path={plain.parent / 'fused'}")[0] == 0
    edit_json(plain.parent / "fused" / "config.json", npu_tuned_layout=layout)
    with pytest.raises(UserError, match=r"lacks weights that its config\.json asks for"):
        load_model(plain.parent / "fused", device="cpu")


def test_a_format_of_the_future(written):
    layout = json.loads((written / "config.json").read_text())["npu_tuned_layout"]
    edit_json(written / "config.json", npu_tuned_layout={**layout, "weight_dtype": "int4"})
    with pytest.raises(UserError, match="this version reads version 1"):
        load_model(written, device="cpu")


def test_an_adapter_comes_too_late(written, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="this one is converted"):
        load_model(written, device="cpu", lora=tmp_path)
