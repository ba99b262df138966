"""Stream checkpoints of dense Qwen2 models into the tuned model, and give its weights back.

The tuned model names its parameters as the checkpoint does, except that q, k and v projections are one `qkv` and the
gate and up projections one `gate_up_proj`. `load_weights` joins them while reading and `unfused_state_dict` takes them
apart again, both as checkpoint_layout.py says. Loading needs the memory of the weights plus that of one shard; a rank
of many reads and holds its part only. Weights that the model holds as int8 are quantised a few rows at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Qwen2Config

from npu_tuned_model.checkpoint_files import StoredTensor, WeightSource
from npu_tuned_model.checkpoint_goals import check_tensors, goals_of, target_of
from npu_tuned_model.checkpoint_layout import (
    EMBEDDING,
    FLOATS,
    HEAD,
    WHOLE,
    Piece,
    Quantised,
    Shard,
    pieces_of,
    scale_name,
    shape_of,
    split_name,
)
from npu_tuned_model.checkpoint_rows import RowReader, Rows
from npu_tuned_model.errors import CheckpointError
from npu_tuned_model.lora import LoraAdapter
from npu_tuned_model.quantise import quantise_rows

_COMPARED_ROWS = 4096
# quantised at a time: they are float32 meanwhile
_CHUNK_ELEMENTS = 2**18


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_ready: Callable[[str, nn.Module], None] | None = None,
    shard: Shard = WHOLE,
    converted: bool = False,
    stored: Quantised = FLOATS,
    adapter: LoraAdapter | None = None,
) -> None:
    """Fill `model`, built on the meta device, with the weights of `folder`.

    Every parameter is allocated once, on `device` in `dtype`, when its first piece is read; pieces are cast while they
    are copied. Peak memory is that of the weights plus one shard. Buffers are left alone.

    Args:
        model: parameters named as in the checkpoint, or fused; `model.config` gives the head counts and whether
            lm_head and embedding are tied, that is, become one Parameter.
        folder: a checkpoint that `read_config` accepts.
        dtype: of all parameters but int8 ones.
        device: of all parameters.
        on_ready: called as `on_ready(module_name, module)` as soon as a module's own parameters are complete. It may
            replace the module in its parent; nothing here refers to the module afterwards.
        shard: the part of the weights that `model` holds; of the files, only this part is read.
        converted: whether the checkpoint holds the fused rows, laid out for `shard.size` ranks.
        stored: which weights the checkpoint holds as int8; what the model alone holds so is quantised on the way.
        adapter: added to the weights, in their dtype.

    Raises:
        CheckpointError: damaged files; weights that are missing or left over, have another shape, or are quantised;
            an adapter of another model.
            All of these are found before the first weight is read, except a `lm_head.weight` that differs from the
            embedding it should be tied to.
        ValueError: a parameter is not on the meta device, or a fused one does not fit `model.config`.
    """
    source = WeightSource(folder)
    filler = _Filler(model, dtype, device, on_ready, shard, converted, stored, adapter)
    filler.expect(folder, source.tensors)
    if adapter is not None:
        adapter.check({name: stored.shape for name, stored in source.tensors.items()})
    with torch.no_grad(), RowReader(source) as reader:
        for name, tensor in source:
            filler.take(name, tensor, reader)
            # The last view of a shard would keep it mapped while the next one is opened.
            del tensor


class _Filler:
    """Puts tensors of a checkpoint, in whatever order they come, into the parameters of a model on the meta device.

    Modules are kept by name only: a module that `on_ready` replaced can be freed at once.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        on_ready: Callable[[str, nn.Module], None] | None,
        shard: Shard,
        converted: bool,
        stored: Quantised,
        adapter: LoraAdapter | None,
    ) -> None:
        self.adapter, self.stored = adapter, stored
        self.model, self.device, self.on_ready = model, device, on_ready
        # Tied embeddings are one target in two places.
        self.places: dict[str, list[str]] = defaultdict(list)
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.requires_grad: dict[str, bool] = {}
        self.data: dict[str, Tensor] = {}
        self.placed: set[tuple[str, int]] = set()
        self.outstanding: Counter[str] = Counter()
        self.incomplete: Counter[str] = Counter()
        config = cast(Qwen2Config, model.config)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # to be quantised, and their scales' names by theirs: such scales come out of the weights
        self.scales = {
            name: scale_name(name)
            for name, parameter in parameters.items()
            if parameter.dtype == torch.int8 and not stored.holds(name)
        }
        made_here = set(self.scales.values())
        self.goals = goals_of((name for name in parameters if name not in made_here), config, shard, converted)
        for name, parameter in parameters.items():
            if parameter.device.type != "meta":
                raise ValueError(f"parameter {name} is on {parameter.device}: build the model on the meta device")
            target = target_of(name, config)
            self.places[target].append(name)
            _check_shape(name, parameter.shape, config, shard)
            self.shapes[target] = parameter.shape
            self.dtypes[target] = torch.int8 if parameter.dtype == torch.int8 else dtype
            self.requires_grad[target] = parameter.requires_grad
            self.incomplete[split_name(name)[0]] += 1

    def expect(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        """Check the tensors that are going to come; CheckpointError where they are not what the model needs."""
        check_tensors(folder, tensors, self.goals, self.stored)
        self.outstanding.update(self.goals[name].target for name in tensors if name in self.goals)

    def take(self, name: str, tensor: Tensor, reader: RowReader) -> None:
        """Copy this rank's part of one tensor into its place; hand over the modules that this completes."""
        if name not in self.goals:
            return
        target, piece = self.goals[name]
        new = (target, piece.target_start) not in self.placed
        if target in self.scales:
            same = self._quantise(name, reader, target, piece, new=new)
        else:
            same = self._copy(name, tensor, target, piece, new=new)
        if not same:
            raise CheckpointError(
                f"{HEAD} and {EMBEDDING} differ although config.json sets tie_word_embeddings: set it to false"
            )
        self.placed.add((target, piece.target_start))
        self.outstanding[target] -= 1
        if self.outstanding[target] == 0:
            self._install(target)
            if target in self.scales:
                self._install(self.scales[target])

    def _place(self, target: str) -> Tensor:
        if target not in self.data:
            self.data[target] = torch.empty(self.shapes[target], dtype=self.dtypes[target], device=self.device)
        return self.data[target]

    def _copy(self, name: str, tensor: Tensor, target: str, piece: Piece, *, new: bool) -> bool:
        """Put a piece in its place; where one is already, say whether it is the same."""
        destination = self._place(target).narrow(piece.dim, piece.target_start, piece.length)
        # A view of the mapped file: the rest of the tensor is never read.
        part = tensor.narrow(piece.dim, piece.start, piece.length)
        if not new:
            return _same(destination, part)
        destination.copy_(part)
        change = None if self.adapter is None else self.adapter.change(name, piece.dim, piece.start, piece.length)
        if change is not None:
            destination += change.to(destination)
        return True

    def _quantise(self, name: str, reader: RowReader, target: str, piece: Piece, *, new: bool) -> bool:
        """As _copy, to int8, and the scales to their place.

        Read in chunks, because a mapped file would be held in memory as far as it was read. Of a piece cut by columns
        whole rows are read: the scales are those of the whole rows.
        """
        integers, scales = self._place(target), self._place(self.scales[target])
        by_rows = piece.dim == 0
        row, target_row = (piece.start, piece.target_start) if by_rows else (0, 0)
        count = max(_CHUNK_ELEMENTS // piece.source_shape[1], 1)
        same = True
        for part in reader.chunks(Rows(name, row, piece.length if by_rows else piece.source_shape[0]), count):
            change = None if self.adapter is None else self.adapter.change(name, 0, row, len(part))
            found, scale = quantise_rows(part if change is None else part + change.to(part))
            if not by_rows:
                found = found.narrow(1, piece.start, piece.length)
            for whole, values in ((integers, found), (scales, scale)):
                place = whole.narrow(0, target_row, len(part))
                if new:
                    place.copy_(values)
                else:
                    same = same and torch.equal(place, values.to(place))
            row, target_row = row + len(part), target_row + len(part)
        return same

    def _install(self, target: str) -> None:
        parameter = nn.Parameter(self.data.pop(target), requires_grad=self.requires_grad[target])
        owners = [split_name(place) for place in self.places[target]]
        for module_name, attribute in owners:
            setattr(self.model.get_submodule(module_name), attribute, parameter)
        for module_name, _ in owners:
            self.incomplete[module_name] -= 1
            if self.on_ready is not None and self.incomplete[module_name] == 0:
                self.on_ready(module_name, self.model.get_submodule(module_name))


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether `theirs`, cast to the dtype of `ours`, is equal; in slices, as an embedding may fill a gigabyte."""
    slices = zip(ours.split(_COMPARED_ROWS), theirs.split(_COMPARED_ROWS))
    return all(torch.equal(a, b.to(a)) for a, b in slices)


def unfused_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a tuned model under the names of the Hugging Face checkpoint; the reverse of `load_weights`.

    Plain weights on a CPU are not copied: the pieces of a fused one are views of it, each made to look like a storage
    of its own, because `save_pretrained` drops tensors that share one. On an accelerator the pieces are copied to the
    host, where they are bound to go; so is the weight of a module that holds it in another form and gives it through
    a method `dense_weight() -> Tensor` of shape (out, in).

    Raises:
        ValueError: a fused parameter does not fit the head counts of `model.config`.
    """
    config = cast(Qwen2Config, model.config)
    state: dict[str, Tensor] = {}
    for name, tensor in _own_weights("", model):
        _check_shape(name, tensor.shape, config, WHOLE)
        pieces = pieces_of(name, config)
        if len(pieces) == 1:
            state[name] = tensor
            continue
        for piece in pieces:
            part = tensor.narrow(piece.dim, piece.target_start, piece.length)
            state[piece.source] = torch.from_dlpack(part) if part.device.type == "cpu" else part.cpu()
    if config.tie_word_embeddings:
        # One tensor under both names, also when lm_head holds the weight in another form.
        state[HEAD] = state[EMBEDDING]
    return state


def _own_weights(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    dense_weight = getattr(module, "dense_weight", None)
    if dense_weight is not None:
        # How such a module keeps its weight, in children of its own perhaps, is no part of the checkpoint.
        yield f"{prefix}weight", dense_weight().detach().cpu().contiguous()
        bias = cast("Tensor | None", module.bias)
        if bias is not None:
            yield f"{prefix}bias", bias.detach()
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield f"{prefix}{name}", parameter.detach()
    for name, child in module.named_children():
        yield from _own_weights(f"{prefix}{name}.", child)


def _check_shape(name: str, shape: torch.Size, config: Qwen2Config, shard: Shard) -> None:
    pieces = pieces_of(name, config, shard)
    if shape_of(pieces) != tuple(shape):
        lengths = " + ".join(str(piece.length) for piece in pieces)
        kind = ("rows", "columns")[pieces[0].dim]
        raise ValueError(f"{name} has shape {tuple(shape)}, model.config asks for {lengths} {kind}")
