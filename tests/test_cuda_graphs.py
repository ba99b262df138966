"""CUDA graphs without a GPU: the same code on a CPU, where inductor compiles with these options and records nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from models import padded_batch, tuned_model

from npu_tuned_model import GraphOptions, TuningOptions, UserError, cuda_graphs
from npu_tuned_model.graph import CompiledSteps

RECORDED = GraphOptions(prefill_bucket=16, cuda_graphs=True)


def test_recorded_steps_generate_the_same(checkpoints, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "check", lambda *given, **options: None)
    options_of_compilations = []
    lookup = torch._dynamo.lookup_backend

    def compiler(graph, inputs, **options):
        options_of_compilations.append(options["config_patches"])
        return lookup("inductor")(graph, inputs, **options)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compiler)
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    ids, mask = padded_batch([9, 4])
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(ids, **arguments)
    model.run_graph(RECORDED)
    for _ in range(2):  # the second with another cache
        assert torch.equal(model.generate(ids, **arguments), expected)
    assert model.steps.graphs == {"prefill": 1, "decode": 1}
    # prefill has few kernels for the work in them, and every prompt length would be recorded
    assert ["triton.cudagraphs" in options for options in options_of_compilations] == [False, True]


def test_a_step_leaves_the_results_of_earlier_steps_alone():
    memory = torch.zeros(2, 3)
    step = cuda_graphs.RecordedDecode(lambda input_ids, positions, window, cache: memory.add_(1))
    cache = SimpleNamespace(keys=[torch.zeros(1)], values=[torch.zeros(1)])
    first, second = (step(None, None, None, cache) for _ in range(2))
    assert torch.equal(first + 1, second)


def test_refusals(checkpoints):
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1])
    with pytest.raises(UserError, match="cuda_graphs records inductor's CUDA kernels, and the model is on cpu: leave"):
        CompiledSteps(model, RECORDED)
    model = tuned_model(checkpoints["gqa_4_2_head_16"][1], TuningOptions(fixed_kv_cache=False))
    with pytest.raises(UserError, match="needs fixed_kv_cache"):
        CompiledSteps(model, RECORDED)


def test_a_torch_that_is_too_old(monkeypatch):
    cuda_graphs.check(torch.device("cuda"), "inductor", fixed_kv_cache=True)
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace(triton=SimpleNamespace()))
    with pytest.raises(UserError, match=r"needs torch 2\.4 or newer, this is"):
        cuda_graphs.check(torch.device("cuda"), "inductor", fixed_kv_cache=True)
