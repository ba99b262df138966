"""What torchair is told to dump: run on the simulated NPU by test_torchair_dump.py, prints one JSON object."""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import torch_npu  # noqa: F401  makes torchair importable
import torchair

from npu_tuned_model import GraphOptions, graph
from npu_tuned_model.simulate import host_ops
from precision import PrecisionDebugger, PrecisionError


def main(folder: str, mode: str, options: str) -> None:
    tool = PrecisionDebugger(dump_path=folder, level="graph", quiet=True, **json.loads(options))
    try:
        # the tuned model's own way to a config
        options_of_graphs = GraphOptions(torchair_mode=mode, configure_torchair=tool.set_torchair_options)
        config = graph._torchair_config(options_of_graphs, tiling_sink=False)
    except PrecisionError as error:
        print(json.dumps({"error": str(error)}))
        return
    _, told = config.as_dict()
    double = torch.compile(lambda x: x * 2, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)
    saved: list[str] = []
    # in a captured graph torchair itself puts a call that saves a tensor behind every node
    save = {"save_npugraph_tensor": lambda given: saved.append(given["save_path"])}
    with tool.start(), mock.patch.dict(host_ops._SPECIAL, save):
        result = double(torch.ones(3, device="npu"))
    print(json.dumps({"told": told, "result": result.tolist(), "summary": str(tool.summary), "saved": saved}))


if __name__ == "__main__":
    main(*sys.argv[1:])
