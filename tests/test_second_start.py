"""The second process with the same configuration finds its compiled graphs on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from npu_tuned_model import load_model
model = load_model(sys.argv[1], device="cpu", dtype="float32")
model.run_graph()
output = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
print(json.dumps({**counters["inductor"], "tokens": output.tolist()}))
"""


def test_the_second_start_compiles_nothing(checkpoints, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(checkpoints["gqa_4_2_head_16"][1])]

    def start() -> dict[str, int]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, kernels = start(), set(tmp_path.rglob("*.so"))
    second = start()
    # prefill and decode
    assert first["fxgraph_cache_miss"] == 2
    assert second["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in second
    assert kernels
    assert set(tmp_path.rglob("*.so")) == kernels
    assert second["tokens"] == first["tokens"]
