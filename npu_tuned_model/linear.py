"""Linear layers in the layout that the device's matmul wants: oneDNN blocks on a CPU, input-major on an NPU.

Models are built and sharded with plain ``nn.Linear``; ``pack_linear`` makes the replacement when the weights are
final. The plain weight is dropped, so no weight is held twice.
"""

from __future__ import annotations

from typing import Callable, Protocol, Sequence, Union, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_tuned_model import cpu_kernels

# One blocked layout serves prefill (a thousand rows) and decode (one row): oneDNN picks it for this row count.
PACKING_ROWS = 1024
PACKABLE_DTYPES = (torch.bfloat16, torch.float32)

_library = torch.library.Library("npu_tuned_model", "DEF")
_library.define("packed_linear(Tensor rows, Tensor packed, Tensor? bias) -> Tensor")


def _packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], None)


def _packed_linear_meta(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], packed.shape[0])


# oneDNN's own operator can't be called from a compiled graph with a weight that isn't frozen into it (inductor
# insists on a constant), and freezing would copy every weight once per graph. Behind a name of its own it can.
_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")
_library.impl("packed_linear", _packed_linear_meta, "Meta")


class PiecewiseLinear(nn.Module):
    """A linear layer whose weight is held in one piece or in several.

    Attributes:
        sizes: output features of each piece, adding up to out_features.
    """

    in_features: int
    out_features: int
    sizes: list[int]

    def piece(self, rows: Tensor, index: int) -> Tensor:
        """(tokens, in) to (tokens, size) by one piece."""
        raise NotImplementedError

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        parts = self.split(rows, self.sizes)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def split(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """One (tokens, size) result per piece.

        Raises:
            ValueError: the weight was packed in other pieces.
        """
        if list(sizes) != self.sizes:
            raise ValueError(f"the weight was packed in pieces of {self.sizes}, not of {list(sizes)}")
        return [self.piece(rows, index) for index in range(len(self.sizes))]


class PackedLinear(PiecewiseLinear):
    """A linear layer whose weight is held in oneDNN's blocked layout, in one piece or in several.

    Source: oneDNN inner product with a reordered weight, as inductor's freezing uses it. For a few rows (decode) the
    same memory is read by a kernel of our own where there is one.
    """

    no_bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], *, kernels: bool = False) -> None:
        """weight (out, in) bfloat16 or float32 on a CPU; sizes: rows of each piece, adding up to out.

        kernels: use cpu_kernels (loaded, bfloat16) for few rows.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.sizes = list(sizes)
        pack = torch.ops.mkldnn._reorder_linear_weight
        self.pieces = nn.ParameterList(
            nn.Parameter(pack(piece.contiguous(), PACKING_ROWS), requires_grad=False)
            for piece in weight.detach().split(self.sizes)
        )
        if bias is not None:
            for index, piece in enumerate(bias.detach().split(self.sizes)):
                self.register_buffer(f"bias{index}", piece.clone(), persistent=False)
        blocks = [
            cpu_kernels.blocks_of(piece.detach(), plain) if kernels else None
            for piece, plain in zip(self.pieces, weight.detach().split(self.sizes))
        ]
        self.few_rows_kernel = all(block is not None for block in blocks)
        if self.few_rows_kernel:
            self.register_buffer("no_bias", weight.new_empty(0), persistent=False)
            for index, block in enumerate(blocks):
                self.register_buffer(f"blocks{index}", block, persistent=False)

    def _bias(self, index: int) -> Tensor | None:
        return getattr(self, f"bias{index}", None)

    def piece(self, rows: Tensor, index: int) -> Tensor:
        """(tokens, in) to (tokens, size) by one piece."""
        if self.few_rows_kernel and rows.dim() == 2 and rows.shape[0] <= cpu_kernels.FEW_ROWS:
            return self._few_rows(rows, index, self.sizes[index])
        return torch.ops.npu_tuned_model.packed_linear.default(rows, self.pieces[index], self._bias(index))

    def _few_rows(self, rows: Tensor, index: int, size: int) -> Tensor:
        bias = self._bias(index)
        blocks = getattr(self, f"blocks{index}")
        return cpu_kernels.few_rows_linear(rows.contiguous(), blocks, self.no_bias if bias is None else bias, size)

    def dense_weight(self) -> Tensor:
        """The weight as (out, in), bit for bit as it was packed."""
        return torch.cat([piece.detach().to_dense() for piece in self.pieces])

    @property
    def bias(self) -> Tensor | None:
        if self._bias(0) is None:
            return None
        return torch.cat([getattr(self, f"bias{index}") for index in range(len(self.sizes))])


class InputMajorLinear(nn.Module):
    """A linear layer whose weight is stored (in, out), so that an NPU graph holds a MatMul and no Transpose."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """(tokens, in) to (tokens, out)."""
        if self.bias is None:
            return torch.mm(rows, self.weight)
        return torch.addmm(self.bias, rows, self.weight)

    def split(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """One (tokens, size) result for each slice of the weight."""
        weights = [weight.t() for weight in self.weight.split(list(sizes), dim=1)]
        return [F.linear(rows, weight, bias) for weight, bias in zip(weights, split_bias(self.bias, sizes))]

    def dense_weight(self) -> Tensor:
        """The weight as (out, in)."""
        return self.weight.detach().t()


class Replacement(Protocol):
    """What stands in the place of an nn.Linear, its weight in another form."""

    in_features: int
    out_features: int

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, rows: Tensor) -> Tensor: ...

    def split(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]: ...


AnyLinear = Union[nn.Linear, Replacement]


def split_bias(bias: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    """A bias (or none) for each slice of a weight."""
    return [None] * len(sizes) if bias is None else bias.split(list(sizes))


def split_linear(linear: AnyLinear, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """One matmul per slice of a fused weight: what the model computed before the weights were fused.

    Args:
        linear: nn.Linear or one of this file's replacements, with sum(sizes) output features.
        rows: (tokens, in).
        sizes: output features of each slice.

    Returns:
        one (tokens, size) tensor per slice.
    """
    split = getattr(linear, "split", None)
    if split is not None:
        parts: list[Tensor] = split(rows, sizes)
        return parts
    plain = cast(nn.Linear, linear)
    weights = plain.weight.split(list(sizes))
    return [F.linear(rows, weight, bias) for weight, bias in zip(weights, split_bias(plain.bias, sizes))]


def packer_for(
    device_type: str, dtype: torch.dtype, *, kernels: bool = False
) -> Callable[[nn.Linear, Sequence[int]], nn.Module] | None:
    """How a linear layer's weight is re-laid for this device, or None where the plain layout is the best there is.

    Args:
        kernels: whether cpu_kernels shall serve decode (they must be loaded).
    """
    if device_type == "npu":
        return lambda linear, sizes: InputMajorLinear(linear.weight, linear.bias)
    if device_type == "cpu" and dtype in PACKABLE_DTYPES and torch.backends.mkldnn.is_available():
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        return lambda linear, sizes: PackedLinear(linear.weight, linear.bias, sizes, kernels=kernels)
    return None
