"""A large linear layer in pieces of its output features, and a lookup in the rows of its table that it needs.

A copy of the whole weight in a wider precision would not fit beside the model, and writing it to memory would take
longer than the matmul; and when calls are checked in rotation, one piece per step is what a step can afford.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Weight elements of a piece.
PIECE = 1 << 22


class Piece(NamedTuple):
    """Arguments of a smaller call, and which columns of the result it computes; None for all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: slice | None

    def of(self, result: Any) -> Any:
        """The part of the call's result that this piece computes."""
        return result if self.columns is None else result[..., self.columns]


def piece_count(name: str, args: tuple[Any, ...]) -> int:
    """How many pieces a call has."""
    if name != "linear" or len(args) < 2 or not isinstance(args[1], Tensor):
        return 1
    weight = args[1]
    if weight.dim() != 2 or weight.layout != torch.strided:
        return 1
    return max(1, min(weight.shape[0], -(-weight.numel() // PIECE)))


def piece(name: str, number: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Piece:
    """The piece of this number. A lookup in a table needs only the rows that are looked up."""
    if name == "embedding" and len(args) > 1 and args[1].dim() == 2 and args[0].numel() < args[1].shape[0]:
        rows, places = args[0].unique(return_inverse=True)
        # padding_idx, by place or by name, changes gradients only and would name another row now
        if len(args) > 2:
            return Piece((places, args[1][rows], None, *args[3:]), kwargs, None)
        return Piece((places, args[1][rows]), {**kwargs, "padding_idx": None}, None)
    if count == 1:
        return Piece(args, kwargs, None)
    features = args[1].shape[0]
    columns = slice(features * number // count, features * (number + 1) // count)
    cut = [args[0], *(entry[columns] if isinstance(entry, Tensor) else entry for entry in args[1:])]
    more = {key: entry[columns] if isinstance(entry, Tensor) else entry for key, entry in kwargs.items()}
    return Piece(tuple(cut), more, columns)


def wide_linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A float32 linear layer on a CPU by oneDNN, which is faster there than the library behind F.linear; None where
    that can't be."""
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    tensors = [args[0], args[1], *([bias] if bias is not None else [])]
    plain = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    if not plain or args[0].dim() < 2 or args[1].dim() != 2 or not torch.backends.mkldnn.is_available():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    rows = args[0].reshape(-1, args[0].shape[-1])
    result = torch.ops.mkldnn._linear_pointwise(rows, args[1], bias, "none", [], "")
    return result.view(*args[0].shape[:-1], args[1].shape[0])
