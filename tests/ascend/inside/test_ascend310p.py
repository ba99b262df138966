"""A chip with limits: no bfloat16, no grouped heads in its attention operators, no FIA."""

from __future__ import annotations

import pytest
import torch
from conftest import layer_config

from npu_tuned_model import TuningOptions
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.simulate.graph_recorder import recorded_graphs
from npu_tuned_model.simulate.unset_model import run_steps, unset_model

pytestmark = pytest.mark.usefixtures("device")


def test_bfloat16_is_refused(small):
    with pytest.raises(UserError, match="Ascend310P3 has no bfloat16; use --dtype=float16"):
        unset_model(small, 1).new_cache(1, 32)


def test_grouped_heads_are_refused_with_the_way_round(small):
    with pytest.raises(UserError, match="not 2 for 14: switch flash_attention off"):
        unset_model(small, 1, dtype=torch.float16).new_cache(1, 32)
    model = unset_model(small, 1, TuningOptions().replace(flash_attention=False), dtype=torch.float16)
    model.run_graph()
    with recorded_graphs() as graphs:
        run_steps(model, batch=2, prompt=16, capacity=32, decode_steps=2)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("attention", "mode", "message"),
    [("fia", "max-autotune", "has no FIA"), ("auto", "npugraph_ex", "FIA only, which Ascend310P3 hasn't")],
)
def test_fia_is_refused(attention, mode, message):
    model = unset_model(layer_config(512, 512, 8, 8, tied=False), 1, dtype=torch.float16)
    model.attention = attention
    model.run_graph(GraphOptions(torchair_mode=mode))
    with pytest.raises(UserError, match=message):
        model.new_cache(1, 32)
