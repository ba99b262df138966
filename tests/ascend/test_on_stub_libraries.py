"""The tests in inside/, each file in a process of its own that has the released torch_npu on stub CANN libraries.

Without the wheel (from the network, kept in the user's cache folder) or a C compiler these tests fail: nothing else
proves the NPU path, so skipping them would be a lie.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npu_tuned_model.simulate.environment import DEFAULT_SOC, run_on_npu

INSIDE = Path(__file__).with_name("inside")
# files of tests that want another chip than DEFAULT_SOC
CHIPS = {"test_ascend950.py": "Ascend950PR_9599", "test_ascend310p.py": "Ascend310P3"}


@pytest.mark.parametrize("name", sorted(path.name for path in INSIDE.glob("test_*.py")))
def test_inside(name):
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(INSIDE / name)]
    result = run_on_npu(command, soc=CHIPS.get(name, DEFAULT_SOC), capture=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    # pytest's own words: no file may pass by holding no test
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
