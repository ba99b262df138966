"""LoRA adapters (arXiv 2106.09685) in PEFT's format, merged into the weights while these are loaded.

A merged model is as fast as one without an adapter. Each rank of many adds to its part of the weights only.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from npu_tuned_model.checkpoint_files import read_file
from npu_tuned_model.checkpoint_layout import some
from npu_tuned_model.errors import CheckpointError

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
# What an adapter may have beside its two matrices a layer, and the value that means that it hasn't.
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layer_replication": None,
}


class LoraAdapter:
    """The matrices of one adapter: W becomes W + scale * B A, where A is (rank, in) and B (out, rank).

    Scale is lora_alpha / rank, or lora_alpha / sqrt(rank) for a rank-stabilised adapter (arXiv 2312.03732), each with
    the patterns of the configuration.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the adapter in `folder` (adapter_config.json and adapter_model.safetensors or .bin).

        Raises:
            CheckpointError: there is none, it is damaged, or it is of a kind that can't be merged into linear layers.
        """
        self.folder = Path(folder)
        self._config = self._read_config()
        self._matrices = self._read_matrices()

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / _CONFIG
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise CheckpointError(f"{self.folder} is no LoRA adapter: it has no readable {_CONFIG}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from None
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA":
            raise CheckpointError(f"{path} describes a {kind} adapter; only LORA ones can be merged")
        for key, plain in _PLAIN.items():
            if config.get(key, plain) not in (plain, None, []):
                raise CheckpointError(
                    f"{path} sets {key} to {config[key]!r}, which can't be merged here: merge the adapter with PEFT "
                    "(merge_and_unload, save_pretrained) and load the result"
                )
        if not all(isinstance(config.get(key), (int, float)) and config[key] > 0 for key in ("r", "lora_alpha")):
            raise CheckpointError(f"{path} needs positive numbers for r and lora_alpha")
        return config

    def _read_matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        path = next((self.folder / name for name in _WEIGHTS if (self.folder / name).is_file()), None)
        if path is None:
            raise CheckpointError(f"{self.folder} has neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}")
        halves: dict[str, dict[str, Tensor]] = {}
        odd = []
        for name, tensor in read_file(path):
            match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])(?:\.\w+)?\.weight", name)
            if match is None:
                odd.append(name)
            else:
                halves.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor.clone()
        single = [name for name, pair in halves.items() if len(pair) != 2]
        if odd or single:
            raise CheckpointError(f"{path} has tensors that are no pair of LoRA matrices: {some(odd + single)}")
        matrices = {name: (pair["A"], pair["B"]) for name, pair in halves.items()}
        for name, (a, b) in matrices.items():
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(f"{path}: {name} has matrices {tuple(a.shape)} and {tuple(b.shape)}: no product")
        return matrices

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless every matrix fits a weight of these checkpoint names and shapes."""
        strangers = [name for name in self._matrices if name not in shapes]
        if strangers:
            raise CheckpointError(f"{self.folder} adapts weights that the model has not: {some(strangers)}")
        for name, (a, b) in self._matrices.items():
            if (b.shape[0], a.shape[1]) != tuple(shapes[name]):
                raise CheckpointError(
                    f"{self.folder} is of another model: {name} is {tuple(shapes[name])}, "
                    f"the adapter's change of it {(b.shape[0], a.shape[1])}"
                )

    def change(self, name: str, dim: int, start: int, length: int) -> Tensor | None:
        """What is to be added to indices [start, start + length) of dimension `dim` of weight `name`.

        Returns:
            float32, or None where the adapter leaves the weight alone.
        """
        if name not in self._matrices:
            return None
        a, b = (matrix.float() for matrix in self._matrices[name])
        part = b.narrow(0, start, length) @ a if dim == 0 else b @ a.narrow(1, start, length)
        return part * self._scale(name, a.shape[0])

    def _scale(self, name: str, rank: int) -> float:
        alpha = self._config["lora_alpha"]
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            # PEFT takes a pattern for the end of a module's name
            if re.match(rf".*\.{pattern}$", name[: -len(".weight")]):
                alpha = value
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))
