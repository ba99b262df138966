"""A file that says which names of one dump are which of the other.

JSON or YAML, a list of rules:

    - golden: model.layers.{n}.self_attn.q_proj:output.0
      target: model.layers.{n}.self_attn.qkv:output.0
      target_slice: [-1, 0, 896]        # dimension, start, stop
    - golden: model.layers.{n}.self_attn/matmul#1:output.0
      target: model.layers.{n}.self_attn/npu_prompt_flash_attention:output.0
      golden_permute: [0, 2, 1, 3]
    - golden: encoder                   # without a place: the module, all inside it, and all its tensors
      target: backbone

A name is a module's path, or path/api, with #k for the k-th such API of a module's call. {n} stands for one part of a
path, the same on both sides. Shapes that differ in dimensions of size 1 or in how batch and sequence are flattened are
reshaped without being told.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import List, Optional

import torch
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from precision.compare.dump_reader import Address
from precision.errors import PrecisionError


class Rule(BaseModel):
    """One line of the file; see the module's docstring.

    Attributes:
        sections: sizes per rank of a fused tensor's pieces, see ranks.combine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    golden: str
    target: str
    golden_slice: Optional[List[int]] = None
    target_slice: Optional[List[int]] = None
    golden_permute: Optional[List[int]] = None
    target_permute: Optional[List[int]] = None
    sections: Optional[List[int]] = None

    def shape_golden(self, tensor: Tensor) -> Tensor:
        """The part of golden's tensor that is compared."""
        return _shape(tensor, self.golden_permute, self.golden_slice)

    def shape_target(self, tensor: Tensor) -> Tensor:
        """The part of target's tensor that is compared."""
        return _shape(tensor, self.target_permute, self.target_slice)

    @property
    def names_tensor(self) -> bool:
        return ":" in self.golden

    def target_of(self, name: str) -> str | None:
        """The target's name for a golden name (path, or path/api, or either with :place), or None."""
        pattern = re.escape(self.golden)
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^./:]+)", pattern)
        match = re.fullmatch(pattern if self.names_tensor else f"{pattern}(?P<rest_>[./].*)?", name)
        if match is None:
            return None
        values = match.groupdict()
        return self.target.format(**{k: v for k, v in values.items() if k != "rest_"}) + (values.get("rest_") or "")


def read_mapping(path: Path) -> list[Rule]:
    """The rules of a mapping file.

    Raises:
        PrecisionError: when it can't be read or a rule is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise PrecisionError(f"the mapping file {path} can't be read ({error.strerror})") from error
    except (ValueError, yaml.YAMLError) as error:
        raise PrecisionError(f"the mapping file {path} can't be understood ({' '.join(str(error).split())})") from error
    if not isinstance(content, list):
        raise PrecisionError(f"the mapping file {path} must be a list of rules with golden and target")
    try:
        return [Rule(**entry) for entry in content]
    except (TypeError, ValidationError) as error:
        raise PrecisionError(
            f"a rule of {path} is wrong ({' '.join(str(error).split())}); keys: {', '.join(Rule.model_fields)}"
        ) from error


def tensor_name(address: Address, place: str) -> str:
    """What a rule calls a tensor."""
    return f"{address}:{place}" if address.direction == "forward" else f"{address}:{address.direction}.{place}"


def _shape(tensor: Tensor, permute: list[int] | None, piece: list[int] | None) -> Tensor:
    if permute is not None:
        tensor = tensor.permute(permute)
    if piece is not None:
        dimension, start, stop = piece
        tensor = tensor.narrow(dimension, start, stop - start)
    return tensor


def same_shape(target: Tensor, golden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in one shape, where they hold equally many elements and agree but for flattening and sizes of 1."""
    if target.shape == golden.shape:
        return target, golden
    if target.numel() == golden.numel() and (
        target.squeeze().shape == golden.squeeze().shape or _merges(target.shape, golden.shape)
    ):
        return target.reshape(golden.shape), golden
    return None


def _merges(left: torch.Size, right: torch.Size) -> bool:
    """Whether one shape comes from the other by joining neighbouring dimensions."""
    long, short = (left, right) if len(left) > len(right) else (right, left)
    place = 0
    for size in short:
        product = 1
        while place < len(long) and product < size:
            product *= long[place]
            place += 1
        if product != size:
            return False
    return True
