"""Element types of stored tensors: their names in torch and in a safetensors file. Knowing them takes no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    """
    Attributes:
        name: as torch has it, and config.json: "bfloat16".
        code: as a safetensors file has it: "BF16" (https://github.com/huggingface/safetensors#format).
        itemsize: bytes of an element.
    """

    name: str
    code: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"

    @property
    def in_torch(self) -> torch.dtype:
        import torch

        return getattr(torch, self.name)


_ALL = (
    Dtype("bool", "BOOL", 1),
    Dtype("uint8", "U8", 1),
    Dtype("int8", "I8", 1),
    Dtype("int16", "I16", 2),
    Dtype("int32", "I32", 4),
    Dtype("int64", "I64", 8),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float16", "F16", 2),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float32", "F32", 4),
    Dtype("float64", "F64", 8),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_CODE = {dtype.code: dtype for dtype in _ALL}


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).rpartition(".")[2]
