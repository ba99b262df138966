"""The tests in inside/ need the simulated NPU in their own process: test_inside.py starts them there."""

from __future__ import annotations

from npu_tuned_model.simulate.environment import in_npu_environment

collect_ignore = [] if in_npu_environment() else ["inside"]
