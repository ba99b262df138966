"""A model divided among the ranks of a process group: each holds its part of every weight, and results are summed.

The network knows nothing of it: `shard_model` gives the empty model this rank's shapes, the weights are loaded, and
`connect` puts the sums behind the layers that need them (arXiv 1909.08053). One collective serves all of them. The
cut follows checkpoint_layout.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config

from npu_tuned_model.checkpoint_layout import EMBEDDING, Cut, Shard, check_tp_size, pieces_of, shape_of, vocabulary_cut
from npu_tuned_model.errors import UserError

AllReduce = Callable[[Tensor], Tensor]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of every rank's `tensor` over the default process group; in place where it can be."""
    if torch._dynamo.is_compiling() and tensor.device.type != "npu":
        from torch.distributed import _functional_collectives

        # What a graph of any torch from 2.1 on can hold. On an NPU torchair puts its own in the place of all_reduce.
        return _functional_collectives.all_reduce(tensor, "sum", dist.distributed_c10d._get_default_group())
    dist.all_reduce(tensor)
    return tensor


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that hold one model together.

    Attributes:
        rank, size: of `size` ranks this is number `rank`.
        all_reduce: the sum of every rank's tensor, which may be overwritten; the same bits on every rank.
    """

    rank: int
    size: int
    all_reduce: AllReduce = sum_over_ranks

    @classmethod
    def of_process_group(cls, all_reduce: AllReduce = sum_over_ranks) -> TensorParallel:
        """The place in the default process group. All ranks call it, and draw rank 0's random numbers from then on.

        Sampling needs that: ranks that drew different tokens would go on with different texts.

        Raises:
            UserError: when there is no process group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise UserError(
                "tensor parallelism needs a process group: start the script with torchrun or deepspeed and call "
                "torch.distributed.init_process_group() first"
            )
        seed = [torch.initial_seed()]
        dist.broadcast_object_list(seed, src=0)
        torch.manual_seed(seed[0])
        return cls(dist.get_rank(), dist.get_world_size(), all_reduce)

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.size)


class EmbeddingShard(nn.Embedding):
    """The rows of an embedding table that one rank holds: looks up its own tokens, and gets the others' by the sum."""

    def __init__(self, first: int, rows: int, width: int, all_reduce: AllReduce) -> None:
        super().__init__(rows, width)
        self.first = first
        self.all_reduce = all_reduce

    def forward(self, input: Tensor) -> Tensor:
        """(...) token numbers of the whole vocabulary to (..., width)."""
        local = input - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = self.look_up(local.clamp(0, self.num_embeddings - 1))
        return self.all_reduce(rows.masked_fill(elsewhere[..., None], 0))

    def look_up(self, local: Tensor) -> Tensor:
        """(...) numbers of this rank's rows to (..., width)."""
        return F.embedding(local, self.weight)


class SummedLinear(nn.Module):
    """A linear layer cut by columns: each rank has its part of the input, the results are summed over the ranks."""

    def __init__(self, linear: nn.Module, all_reduce: AllReduce) -> None:
        super().__init__()
        self.linear = linear
        self.all_reduce = all_reduce

    @property
    def in_features(self) -> int:
        """Of this rank's part."""
        return cast(int, self.linear.in_features)

    def forward(self, rows: Tensor) -> Tensor:
        """(..., this rank's part of the input) to (..., out)."""
        return self.all_reduce(self.linear(rows))


class LogitsShard(nn.Module):
    """The output layer cut by rows: each rank computes the logits of its part of the vocabulary and gets the rest."""

    def __init__(self, linear: nn.Module, cut: Cut, all_reduce: AllReduce) -> None:
        super().__init__()
        self.linear = linear
        self.before, self.behind = cut.start, cut.total - cut.start - cut.length
        self.all_reduce = all_reduce

    def forward(self, rows: Tensor) -> Tensor:
        """(..., hidden) to (..., whole vocabulary)."""
        # Zeros in the other ranks' places: their sum is exact.
        return self.all_reduce(F.pad(self.linear(rows), (self.before, self.behind)))


def shard_model(model: nn.Module, parallel: TensorParallel) -> None:
    """Give an empty model on the meta device the shapes of one rank's part, in place.

    Raises:
        UserError: when the model can't be divided among that many ranks.
    """
    config = cast(Qwen2Config, model.config)
    check_tp_size(config, parallel.size)

    def local_shape(name: str) -> tuple[int, ...]:
        return shape_of(pieces_of(name, config, parallel.shard))

    with torch.device("meta"):
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                rows, columns = local_shape(f"{name}.weight")
                _replace(model, name, nn.Linear(columns, rows, bias=module.bias is not None))
        rows, width = local_shape(EMBEDDING)
        first = vocabulary_cut(config, parallel.shard).start
        _replace(model, EMBEDDING.rpartition(".")[0], EmbeddingShard(first, rows, width, parallel.all_reduce))
    if config.tie_word_embeddings:
        cast(Any, model).tie_weights()


def connect(model: nn.Module, parallel: TensorParallel) -> None:
    """Put the sums over the ranks behind the layers of a loaded part that need them, in place.

    What looks for a layer that is whole, such as a kernel for several layers at once, doesn't find one.
    """
    for name, module in list(model.named_modules()):
        if name.endswith((".self_attn.o_proj", ".mlp.down_proj")):
            _replace(model, name, SummedLinear(module, parallel.all_reduce))
    cut = vocabulary_cut(cast(Qwen2Config, model.config), parallel.shard)
    _replace(model, "lm_head", LogitsShard(model.get_submodule("lm_head"), cut, parallel.all_reduce))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
