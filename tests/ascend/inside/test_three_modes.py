"""Eager, GE and captured: the same logits as on a CPU, though the rotary operator overwrites its inputs in two of them.

The simulated device does what the real one does: eager and captured kernels write their rotated query and key over the
ones given, a GE graph works on copies. Prompts are of different lengths, padded on the left.
"""

from __future__ import annotations

import pytest
import torch
from models import padded_batch, save, stock_model, tiny_config, tuned_logits

from npu_tuned_model import TuningOptions, UserError, load_model
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.modeling_qwen2 import Qwen2Attention
from npu_tuned_model.ops import ascend
from npu_tuned_model.simulate import graph_engine
from npu_tuned_model.step import _visible

pytestmark = pytest.mark.usefixtures("device")
MODES = [None, "max-autotune", "reduce-overhead"]
IDS, MASK = padded_batch([9, 5, 12])
NEW = torch.randint(2, 320, (3, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    graph_engine.install()
    return save(stock_model(tiny_config("gqa_14_2_head_64")), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def on_cpu(folder):
    return tuned_logits(load_model(folder, device="cpu", dtype="float32"), IDS, MASK, NEW)


def on_npu(folder, mode, attention="auto", **options):
    model = load_model(folder, device="npu", dtype="float32", options=TuningOptions().replace(**options))
    model.attention = attention
    if mode is not None:
        model.run_graph(GraphOptions(torchair_mode=mode, prefill_bucket=16))
    return tuned_logits(model, IDS.to("npu"), MASK.to("npu"), NEW.to("npu")).cpu()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"attention": "fia"}, {"kv_lengths": False}, {"fixed_kv_cache": False}, {"flash_attention": False}],
    ids=str,
)
def test_logits_are_those_of_the_cpu(folder, on_cpu, mode, options):
    torch.testing.assert_close(on_npu(folder, mode, **options), on_cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_int8_weights(folder, mode):
    """Against the CPU's portable operator, in bfloat16: the NPU's takes no float32."""
    arguments = {"dtype": "bfloat16", "weight_dtype": "int8"}
    model = load_model(folder, device="npu", **arguments)
    if mode is not None:
        model.run_graph(GraphOptions(torchair_mode=mode, prefill_bucket=16))
    portable = load_model(folder, device="cpu", options=TuningOptions().replace(native_kernels=False), **arguments)
    wanted = tuned_logits(portable, IDS, MASK, NEW)
    found = tuned_logits(model, IDS.to("npu"), MASK.to("npu"), NEW.to("npu")).cpu()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.1)
    assert (tuned_logits(load_model(folder, device="cpu"), IDS, MASK, NEW) - wanted).abs().max() > 1e-3


def test_int8_weights_in_float32_are_refused(folder):
    with pytest.raises(UserError, match=r"bfloat16 or float16 only, not torch\.float32"):
        load_model(folder, device="npu", dtype="float32", weight_dtype="int8")


def test_the_causal_mask_is_true_where_masked_out(folder):
    cache = load_model(folder, device="npu", dtype="float32").new_cache(2, 10)
    assert torch.equal(cache.causal_mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))


# what must turn these tests red


class ReadsAgain(Qwen2Attention):
    """Uses the projection once more after the rotary operator was given a view of it."""

    def forward(self, hidden, step):
        merged = self.qkv(hidden)
        self.qkv.forward = lambda rows: merged
        try:
            context = super().forward(hidden, step)
        finally:
            del self.qkv.forward
        return context + merged[:, : context.shape[1]]


def test_reading_what_the_rotary_operator_overwrote_goes_red(folder, monkeypatch):
    monkeypatch.setattr("npu_tuned_model.modeling_qwen2.Qwen2Attention", ReadsAgain)
    wanted = tuned_logits(load_model(folder, device="cpu", dtype="float32"), IDS, MASK, NEW)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(on_npu(folder, None), wanted, rtol=1e-4, atol=1e-4)


def test_a_mask_of_the_wrong_polarity_goes_red(folder, on_cpu, monkeypatch):
    def inverted(*arguments):
        return {name: ~mask for name, mask in _visible(*arguments).items()}

    monkeypatch.setattr("npu_tuned_model.step._visible", inverted)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(on_npu(folder, None, kv_lengths=False), on_cpu, rtol=1e-4, atol=1e-4)


def test_another_rotary_layout_goes_red(folder, on_cpu, monkeypatch):
    rotary = ascend.npu_apply_rotary_pos_emb

    def interleaved(query, key, *arguments):
        pairs = [torch.stack(part.chunk(2, -1), -1).flatten(-2) for part in (query, key)]
        return rotary(*pairs, *arguments)

    monkeypatch.setattr(ascend, "npu_apply_rotary_pos_emb", interleaved)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(on_npu(folder, None), on_cpu, rtol=1e-4, atol=1e-4)
