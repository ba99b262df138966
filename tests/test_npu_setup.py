"""The NPU set-up on a machine without one: what acts on a CPU, what is left alone, and that the table tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from npu_tuned_model.npu_setup import (
    NpuSetup,
    PreparedSetup,
    prepare_weights,
    set_up,
)

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = list(NpuSetup.names())


def test_every_option_has_its_reason() -> None:
    assert NpuSetup.__doc__ is not None
    assert all(f"        {name}: " in NpuSetup.__doc__ for name in NAMES)


def test_one_cpu_process_is_left_as_it_is() -> None:
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    prepared = set_up(NpuSetup(), torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4))
    prepare_weights(prepared, model)
    assert type(model[0]) is nn.Linear
    rows = {row.name: row for row in prepared.in_force()}
    assert list(rows) == NAMES
    assert [name for name, row in rows.items() if row.active] == ["frozen_gc"]
    assert all(row.why for row in rows.values())
    assert "HCCL_CONNECT_TIMEOUT" not in os.environ
    if affinity is not None:
        assert os.sched_getaffinity(0) == affinity


def test_what_is_switched_off_is_not_done() -> None:
    off = NpuSetup(**dict.fromkeys(NAMES, False))
    prepared = set_up(off, torch.device("cpu"), local_rank=0, local_ranks=2, ranks=2)
    assert prepared.done == {}
    assert not any(row.active or row.asked for row in prepared.in_force())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_one_of_several_processes_on_a_host() -> None:
    code = (
        "import json, os, torch\n"
        "from npu_tuned_model.npu_setup import NpuSetup, set_up\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "prepared = set_up(NpuSetup(), torch.device('cpu'), local_rank=0, local_ranks=len(cores), ranks=len(cores))\n"
        "bound = sorted(os.sched_getaffinity(0)) == cores[:1]\n"
        "print(json.dumps([bound, torch.get_num_threads(), prepared.done]))"
    )
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core can't be shared out")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    bound, threads, done = json.loads(result.stdout)
    assert bound
    assert threads == 1
    assert set(done) == {"core_binding", "frozen_gc"}


def test_the_table_shows_done_not_done_and_off() -> None:
    prepared = PreparedSetup(NpuSetup(frozen_gc=False), {"nz_weights": "in 4 layers"}, {"core_binding": "one card"})
    rows = {row.name: (row.asked, row.active, row.why) for row in prepared.in_force()}
    assert rows["nz_weights"] == (True, True, "in 4 layers")
    assert rows["core_binding"] == (True, False, "one card")
    assert rows["frozen_gc"] == (False, False, "switched off")
