"""What is in inside/ runs only where torch_npu is: in a subprocess that test_on_stub_libraries.py starts."""

from __future__ import annotations

from npu_tuned_model.simulate.environment import in_npu_environment

collect_ignore = [] if in_npu_environment() else ["inside"]
