"""Linear layers and embedding tables with int8 weights and one scale for each output feature (see quantise.py)."""

from __future__ import annotations

from typing import Callable, Sequence, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_tuned_model import cpu_int8, ops
from npu_tuned_model.linear import PiecewiseLinear, split_bias
from npu_tuned_model.quantise import SCALE_DTYPE
from npu_tuned_model.tensor_parallel import EmbeddingShard

# what npu_weight_quant_batchmatmul takes in either direction
MOST_FEATURES = 65535


class Int8Linear(nn.Linear):
    """A linear layer whose weight is int8 (out, in): what models are built with, what serves any CPU and CUDA.

    Source: npu_weight_quant_batchmatmul, whose portable side multiplies with the scaled integers.
    """

    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        _hold_integers(self, out_features, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """(tokens, in) to (tokens, out)."""
        return _multiply(input, self.weight.t(), self.weight_scale, self.bias)

    def split(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """One (tokens, size) result for each slice of the weight."""
        slices = zip(self.weight.split(list(sizes)), self.weight_scale.split(list(sizes)), split_bias(self.bias, sizes))
        return [_multiply(rows, weight.t(), scale, bias) for weight, scale, bias in slices]

    def dense_weight(self) -> Tensor:
        """The weight as (out, in), in the scales' dtype."""
        return self.weight.to(self.weight_scale.dtype) * self.weight_scale[:, None]


def _hold_integers(module: nn.Module, rows: int, columns: int) -> None:
    device = cast(Tensor, module.weight).device
    module.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.int8, device=device), requires_grad=False)
    module.weight_scale = nn.Parameter(torch.empty(rows, dtype=SCALE_DTYPE, device=device), requires_grad=False)


def _multiply(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    # the operator takes a float32 bias with bfloat16 inputs
    wide = bias if bias is None or rows.dtype != torch.bfloat16 else bias.float()
    return ops.npu_weight_quant_batchmatmul(rows, weight, scale, bias=wide)


class InputMajorInt8Linear(PiecewiseLinear):
    """An int8 linear layer for an NPU: its weight is stored (in, out), so that a graph holds no Transpose.

    The operator takes no more than MOST_FEATURES, and a vocabulary has more: such a weight is held in pieces.
    """

    def __init__(self, linear: Int8Linear, sizes: Sequence[int]) -> None:
        """sizes: output features of each piece, adding up to all."""
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.sizes = [part for size in sizes for part in _parts(size)]
        wide = torch.float32 if linear.weight_scale.dtype == torch.bfloat16 else linear.weight_scale.dtype
        biases = split_bias(None if linear.bias is None else linear.bias.detach().to(wide), self.sizes)
        weights, scales = linear.weight.detach().split(self.sizes), linear.weight_scale.detach().split(self.sizes)
        self.weights, self.scales, self.biases = (
            nn.ParameterList(nn.Parameter(part.contiguous(), requires_grad=False) for part in parts)
            for parts in ([weight.t() for weight in weights], scales, [bias for bias in biases if bias is not None])
        )

    def piece(self, rows: Tensor, index: int) -> Tensor:
        """(tokens, in) to (tokens, size) by one piece."""
        bias = self.biases[index] if len(self.biases) else None
        return ops.npu_weight_quant_batchmatmul(rows, self.weights[index], self.scales[index], bias=bias)

    def dense_weight(self) -> Tensor:
        """The weight as (out, in), in the scales' dtype."""
        pieces = zip(self.weights, self.scales)
        return torch.cat([(weight.detach().to(scale.dtype) * scale).t() for weight, scale in pieces])

    @property
    def bias(self) -> Tensor | None:
        return torch.cat([*self.biases]).to(self.scales[0].dtype) if len(self.biases) else None


def _parts(size: int) -> list[int]:
    """`size` in as few, nearly equal parts of no more than MOST_FEATURES as possible."""
    count = -(-size // MOST_FEATURES)
    return [size * (part + 1) // count - size * part // count for part in range(count)]


class PackedInt8Linear(PiecewiseLinear):
    """An int8 linear layer for a CPU with the C++ kernels, its weight in their blocks, in one piece or in several."""

    few_rows_kernel = True

    def __init__(self, linear: Int8Linear, sizes: Sequence[int]) -> None:
        """sizes: output features of each piece, adding up to all."""
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.sizes = list(sizes)
        self.dtype = linear.weight_scale.dtype
        self.has_bias = linear.bias is not None
        weights, scales = linear.weight.detach().split(self.sizes), linear.weight_scale.detach().split(self.sizes)
        biases = split_bias(None if linear.bias is None else linear.bias.detach(), self.sizes)
        for index, (weight, scale, bias) in enumerate(zip(weights, scales, biases)):
            blocks, padded = cpu_int8.pack(weight, scale)
            shift = scale.new_empty(0) if bias is None else bias.clone()
            for name, tensor in (("blocks", blocks), ("scales", padded), ("bias", shift)):
                self.register_buffer(f"{name}{index}", tensor, persistent=False)

    def piece(self, rows: Tensor, index: int) -> Tensor:
        """(tokens, in) to (tokens, size) by one piece."""
        blocks, scales, bias = (getattr(self, f"{name}{index}") for name in ("blocks", "scales", "bias"))
        return cpu_int8.linear(rows, blocks, scales, bias, self.sizes[index])

    def dense_weight(self) -> Tensor:
        """The weight as (out, in), in the model's dtype."""
        return torch.cat([self.rows(torch.arange(size), index) for index, size in enumerate(self.sizes)])

    def rows(self, numbers: Tensor, index: int = 0) -> Tensor:
        """Rows of a piece's weight: (...) row numbers to (..., in), in the model's dtype."""
        rows = cpu_int8.rows_of(getattr(self, f"blocks{index}"), getattr(self, f"scales{index}"), numbers)
        return rows.to(self.dtype)

    @property
    def bias(self) -> Tensor | None:
        return torch.cat([getattr(self, f"bias{index}") for index in range(len(self.sizes))]) if self.has_bias else None


class Int8Embedding(nn.Embedding):
    """An embedding table of int8 rows with a scale each."""

    weight_scale: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        _hold_integers(self, rows, width)

    def forward(self, input: Tensor) -> Tensor:
        """(...) row numbers to (..., width)."""
        return _look_up(self, input)

    def dense_weight(self) -> Tensor:
        """The table as (rows, width), in the scales' dtype."""
        return self.weight.to(self.weight_scale.dtype) * self.weight_scale[:, None]


class Int8EmbeddingShard(EmbeddingShard):
    """One rank's rows of such a table."""

    weight_scale: Tensor

    def __init__(self, plain: EmbeddingShard) -> None:
        super().__init__(plain.first, plain.num_embeddings, plain.embedding_dim, plain.all_reduce)
        _hold_integers(self, plain.num_embeddings, plain.embedding_dim)

    def look_up(self, local: Tensor) -> Tensor:
        return _look_up(self, local)


def _look_up(table: Int8Embedding | Int8EmbeddingShard, numbers: Tensor) -> Tensor:
    scale = table.weight_scale
    return F.embedding(numbers, table.weight).to(scale.dtype) * F.embedding(numbers, scale[:, None])


class PackedInt8Embedding(nn.Module):
    """The embedding table of a model whose output layer shares it: rows out of that layer's blocks."""

    bias = None

    def __init__(self, output: PackedInt8Linear) -> None:
        super().__init__()
        self.output = output

    def forward(self, input: Tensor) -> Tensor:
        """(...) row numbers to (..., width)."""
        return self.output.rows(input)

    def dense_weight(self) -> Tensor:
        """The table as (rows, width), in the model's dtype."""
        return self.output.dense_weight()


class PackedInt8EmbeddingShard(EmbeddingShard):
    """One rank's rows of such a table."""

    def __init__(self, plain: EmbeddingShard, output: PackedInt8Linear) -> None:
        with torch.device("meta"):
            super().__init__(plain.first, plain.num_embeddings, plain.embedding_dim, plain.all_reduce)
        del self.weight
        self.output = output

    def look_up(self, local: Tensor) -> Tensor:
        return self.output.rows(local)


def packed_embedding(table: nn.Module, output: PackedInt8Linear) -> nn.Module:
    """What looks up the rows of `table` in an output layer that shares them."""
    return PackedInt8EmbeddingShard(table, output) if isinstance(table, EmbeddingShard) else PackedInt8Embedding(output)


def int8_packer_for(device_type: str, *, kernels: bool) -> Callable[[Int8Linear, Sequence[int]], nn.Module] | None:
    """How an int8 linear layer is re-laid for this device, as linear.packer_for says of others.

    The int8 layer isn't to be used any more: its memory may be that of the result.
    """

    def pack_for_kernels(linear: Int8Linear, sizes: Sequence[int]) -> nn.Module:
        return PackedInt8Linear(linear, sizes) if cpu_int8.why_not(linear.in_features) is None else linear

    if device_type == "npu":
        return InputMajorInt8Linear
    return pack_for_kernels if kernels else None


def hold_int8(model: nn.Module, *, embeddings: bool) -> None:
    """Make a model on the meta device, cut for its rank, one whose weights are int8; in place.

    Args:
        embeddings: whether the embedding table and the output layer are, too.
    """
    for name, module in list(model.named_modules()):
        with torch.device("meta"):
            replacement = _int8_twin(name, module, embeddings)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _int8_twin(name: str, module: nn.Module, embeddings: bool) -> nn.Module | None:
    if isinstance(module, nn.Linear) and (embeddings or name != "lm_head"):
        return Int8Linear(module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, EmbeddingShard) and embeddings:
        return Int8EmbeddingShard(module)
    if isinstance(module, nn.Embedding) and embeddings:
        return Int8Embedding(module.num_embeddings, module.embedding_dim)
    return None
