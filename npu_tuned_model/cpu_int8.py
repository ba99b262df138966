"""int8 linear layers on a CPU with the C++ kernels: decode on the integers, prefill on a few megabytes made bfloat16.

The kernels' layout: for each 64 output features and each four inputs, the 64 features' four bytes, 128 more than they
are. A prompt's matmul is oneDNN's: one tile of the weight after the other is multiplied by its scales into a packed
bfloat16 weight that is used again and again.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from npu_tuned_model import cpu_kernels
from npu_tuned_model.linear import PACKING_ROWS

BLOCK, QUAD, OFFSET = 64, 4, 128
# Weights of a tile: beside them there must be room in the cache for the rows.
TILE_ELEMENTS = 4 * 2**20

_library = torch.library.Library("npu_tuned_model", "FRAGMENT")
_library.define("int8_linear(Tensor rows, Tensor blocks, Tensor scales, Tensor bias, int out_features) -> Tensor")


def why_not(in_features: int) -> str | None:
    """Why the kernels can't serve int8 weights of so many inputs; None when they can."""
    reason = cpu_kernels.why_not()
    if reason is not None:
        return reason
    if in_features % QUAD:
        return f"needs a multiple of {QUAD} inputs, not {in_features}"
    if _tile(BLOCK, in_features) is None:
        return "oneDNN packs weights in a layout that the kernels don't know"
    return None


def pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) int8, contiguous, and scale (out,) in the kernels' layout.

    Returns:
        (out / 64 rounded up, in / 4, 64, 4) uint8, and (out / 64 rounded up, 64) float32; features that aren't there
        are zeros. Where out is a multiple of 64, the first is the memory of `weight`, which is lost.
    """
    out_features, in_features = weight.shape
    rest = -out_features % BLOCK
    rows = (pad(weight, (0, 0, 0, rest)) if rest else weight).view(torch.uint8)
    blocks = rows.view(-1, in_features // QUAD, BLOCK, QUAD)
    # 64 rows fill as many bytes one way as the other
    for block, plain in zip(blocks, rows.split(BLOCK)):
        # adding 128 to the number is flipping the highest bit of its two's complement
        block.copy_(plain.bitwise_xor(OFFSET).view(BLOCK, -1, QUAD).transpose(0, 1))
    return blocks, pad(scale.float(), (0, rest)).view(-1, BLOCK)


def rows_of(blocks: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    """Rows of the weight that `pack` packed: (...) row numbers -> (..., in) float32."""
    block, place = numbers // BLOCK, numbers % BLOCK
    return (blocks[block, :, place].flatten(-2).float() - OFFSET) * scales[block, place][..., None]


def linear(rows: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """rows (tokens, in) bfloat16 times a weight that `pack` packed, plus bias (out,) or an empty tensor."""
    result: Tensor = torch.ops.npu_tuned_model.int8_linear.default(rows, blocks, scales, bias, out_features)
    return result


def _linear(rows: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor, out_features: int) -> Tensor:
    if rows.shape[0] <= cpu_kernels.FEW_ROWS:
        few_rows = torch.ops.npu_tuned_model.few_rows_int8_linear.default
        return few_rows(rows.contiguous(), blocks, scales, bias, out_features)
    step = max(TILE_ELEMENTS // rows.shape[1] // BLOCK, 1)
    shift = None if bias.numel() == 0 else pad(bias, (0, -out_features % BLOCK))
    parts = []
    for first in range(0, blocks.shape[0], step):
        some = blocks[first : first + step]
        tile = _tile(some.shape[0] * BLOCK, rows.shape[1])
        assert tile is not None
        packed, memory = tile
        torch.ops.npu_tuned_model.expand_int8_blocks.default(some, scales[first : first + step], memory)
        part = None if shift is None else shift[first * BLOCK : (first + some.shape[0]) * BLOCK]
        parts.append(torch.ops.mkldnn._linear_pointwise.default(rows, packed, part, "none", [], None))
    result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return result if result.shape[1] == out_features else result[:, :out_features].contiguous()


@functools.cache
def _tile(features: int, in_features: int) -> tuple[Tensor, Tensor] | None:
    """A bfloat16 weight as oneDNN packs it, and its memory to write to; None where its layout isn't known."""
    weight = torch.randn(features, in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
    memory = cpu_kernels.blocks_of(packed, weight)
    return None if memory is None else (packed, memory)


def _linear_meta(rows: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor, out_features: int) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)


_library.impl("int8_linear", _linear, "CPU")
_library.impl("int8_linear", _linear_meta, "Meta")
