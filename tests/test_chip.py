"""The choice of attention operators, without an NPU: the chip's name is made up."""

from __future__ import annotations

import pytest
import torch

from npu_tuned_model import chip
from npu_tuned_model.chip import FIA, IFA, PFA, AttentionPlan, plan_attention
from npu_tuned_model.errors import UserError

CPU = torch.device("cpu")


class FakeNPU:
    type = "npu"


@pytest.fixture
def on(monkeypatch):
    """plan_attention on a chip of this name."""

    def plan(name, **arguments):
        monkeypatch.setattr(chip, "chip_name", lambda: name)
        return plan_attention(FakeNPU(), **arguments)

    return plan


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Ascend910B3", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend910_9599", "950"),
        ("Ascend950PR_9599", "950"),
        ("Ascend310P3", "310P"),
        ("Ascend910A", None),
    ],
)
def test_families(name, family):
    assert chip.family(name) == family


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Ascend910B3", {}, (PFA, IFA, "host")),
        ("Ascend910_9391", {"torchair_mode": "max-autotune"}, (PFA, IFA, "host")),
        ("Ascend910B3", {"torchair_mode": "reduce-overhead"}, (PFA, FIA, "host")),
        ("Ascend910B3", {"torchair_mode": "npugraph_ex"}, (PFA, FIA, "host")),
        ("Ascend910B3", {"asked": "fia"}, (FIA, FIA, "host")),
        ("Ascend910B3", {"asked": "fia", "torchair_mode": "max-autotune"}, (FIA, FIA, "device")),
        ("Ascend910B3", {"asked": "fia", "torchair_mode": "max-autotune", "tiling_sink": False}, (FIA, FIA, "host")),
        ("Ascend950PR_9599", {}, (FIA, FIA, "host")),
        ("Ascend310P3", {}, (PFA, IFA, "host")),
        ("Ascend910B3", {"kv_lengths": False}, (PFA, IFA, "mask")),
        ("a newer chip", {}, (FIA, FIA, "host")),
    ],
)
def test_plans(on, name, arguments, expected):
    plan = on(name, **arguments)
    assert (plan.prompt, plan.decode, plan.lengths, plan.chip) == (*expected, name)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Ascend950PR_9599", {"asked": "pfa_ifa"}, "Ascend950PR_9599 has no PFA and IFA"),
        ("Ascend310P3", {"asked": "fia"}, "Ascend310P3 has no FIA; use attention='pfa_ifa' or 'auto'"),
        ("Ascend310P3", {"torchair_mode": "npugraph_ex"}, "which Ascend310P3 hasn't; use max-autotune"),
        ("Ascend910B3", {"asked": "flash"}, "no attention operators 'flash'; there are auto, pfa_ifa, fia"),
    ],
)
def test_what_a_chip_has_not_is_refused(on, name, arguments, message):
    with pytest.raises(UserError, match=message):
        on(name, **arguments)


def test_other_devices_read_a_window():
    assert plan_attention(CPU) == AttentionPlan(PFA, IFA, "window", None)
    assert plan_attention(CPU, kv_lengths=False).lengths == "device"
    assert plan_attention(CPU, flash_attention=False).decode == chip.SMALL_OPS


def test_the_plan_in_words(on):
    assert str(on("Ascend910B3")) == f"{PFA}, {IFA} on Ascend910B3, lengths by host"
    assert str(on("Ascend950PR_9599")) == f"{FIA} on Ascend950PR_9599, lengths by host"
