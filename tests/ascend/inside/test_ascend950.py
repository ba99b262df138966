"""A chip without PFA and IFA: one attention operator, in every mode."""

from __future__ import annotations

import pytest
from layer_checks import check_layers

from npu_tuned_model.chip import FIA
from npu_tuned_model.errors import UserError
from npu_tuned_model.simulate.graph_recorder import recorded_graphs
from npu_tuned_model.simulate.unset_model import run_steps, unset_model

pytestmark = pytest.mark.usefixtures("device")


def test_nodes(small):
    graphs = {}
    for layers in (1, 2):
        model = unset_model(small, layers)
        model.run_graph()
        with recorded_graphs() as graphs[layers]:
            run_steps(model, batch=2, prompt=16, capacity=32, decode_steps=3)
        plan = model.attention_plan()
        assert (plan.prompt, plan.decode, plan.chip) == (FIA, FIA, "Ascend950PR_9599")
    for one, two in zip(graphs[1], graphs[2]):
        check_layers(one, two, "FusedInferAttentionScore")
        assert two.static


def test_asking_for_the_operators_it_lacks_is_refused(small):
    model = unset_model(small, 1)
    model.attention = "pfa_ifa"
    with pytest.raises(UserError, match="has no PFA and IFA"):
        model.new_cache(1, 32)
