"""Hugging Face checkpoints of dense Qwen2 models: find them, check them, and stream them into the tuned model.

The tuned model names its parameters as the checkpoint does, except that q, k and v projections are one `qkv` and the
gate and up projections one `gate_up_proj`. `load_weights` joins them while reading and `unfused_state_dict` takes them
apart again, both from the one table `_FUSED`. Loading needs the memory of the weights plus that of one shard.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import Qwen2Config

from npu_tuned_model.config import first_line, read_json
from npu_tuned_model.errors import CheckpointError

_FUSED = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Old checkpoints carry this table; the model computes its own.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES_SHOWN = 8
_COMPARED_ROWS = 4096


class StoredTensor(NamedTuple):
    """What a checkpoint says about one of its tensors."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource:
    """The weights of a checkpoint folder: `model.safetensors` or `pytorch_model.bin`, in one file or in shards.

    The constructor reads headers only. Iterating gives (name, tensor) pairs, shard by shard and never with two shards
    open. A tensor is a view of the mapped file: let go of it before asking for the next, or its shard stays mapped.

    Attributes:
        tensors: name -> StoredTensor, in the order in which iterating gives them.

    Raises:
        CheckpointError: no weights, a shard that is missing or damaged, or an index that does not match its shards.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        listed = _weight_files(Path(folder))
        missing = [file.name for file in listed if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: shards are missing: {', '.join(missing)}: download them again")
        for file, expected in listed.items():
            found = {}
            for name, tensor in _read_file(file):
                found[name] = StoredTensor(file, tuple(tensor.shape), tensor.dtype)
                del tensor
            if expected is not None:
                _check_index(file, expected, set(found))
            self.tensors.update(found)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in dict.fromkeys(stored.file for stored in self.tensors.values()):
            yield from _read_file(file)


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The weight files of a folder, each with the names an index lists for it (None: there is no index)."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return {folder / name: None}
        index = folder / f"{name}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index} has no weight_map from tensors to files: download it again")
            files: dict[Path, set[str] | None] = {}
            for file in sorted(set(weight_map.values())):
                files[folder / file] = {tensor for tensor, holder in weight_map.items() if holder == file}
            return files
    raise CheckpointError(
        f"{folder} holds no weights: expected model.safetensors, pytorch_model.bin, or the .index.json of either"
    )


def _check_index(file: Path, expected: set[str], found: set[str]) -> None:
    if expected - found:
        raise CheckpointError(
            f"{file} lacks tensors that the index lists for it: {_some(expected - found)}: download it again"
        )
    if found - expected:
        raise CheckpointError(
            f"{file} holds tensors that the index does not list for it: {_some(found - expected)}: "
            "index and shards are not of the same checkpoint, download them again"
        )


def _read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor in a weight file; bytes are read from the disk only when a tensor is used."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                for name in handle.keys():
                    yield name, handle.get_tensor(name)
        else:
            # A str, not a Path: torch 2.1 maps nothing else.
            state = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise CheckpointError(f"{file} is not a plain table of tensors: save the model's state_dict instead")
            for name in list(state):
                yield name, state.pop(name).detach()
    # torch reports a file that is cut off as an OSError or a RuntimeError, depending on where.
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(_why_unreadable(file, error)) from error


def _why_unreadable(file: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"{file} cannot be read ({first_line(error)}): check its permissions"
    with file.open("rb") as stream:
        if stream.read(7) == b"version":
            return f"{file} is a Git LFS pointer, not the weights: run 'git lfs pull'"
    return f"{file} cannot be read, it is truncated or corrupt ({first_line(error)}): download it again"


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_ready: Callable[[str, nn.Module], None] | None = None,
) -> None:
    """Fill `model`, built on the meta device, with the weights of `folder`.

    Every parameter is allocated once, on `device` in `dtype`, when its first piece is read; pieces are cast while they
    are copied. Peak memory is that of the weights plus one shard. Buffers are left alone.

    Args:
        model: parameters named as in the checkpoint, or fused; `model.config` gives the head counts and whether
            lm_head and embedding are tied, that is, become one Parameter.
        folder: a checkpoint that `read_config` accepts.
        dtype: of all parameters.
        device: of all parameters.
        on_ready: called as `on_ready(module_name, module)` as soon as a module's own parameters are complete. It may
            replace the module in its parent; nothing here refers to the module afterwards.

    Raises:
        CheckpointError: damaged files; weights that are missing or left over, have another shape, or are quantised.
            All of these are found before the first weight is read, except a `lm_head.weight` that differs from the
            embedding it should be tied to.
        ValueError: a parameter is not on the meta device, or a fused one does not fit `model.config`.
    """
    source = WeightSource(folder)
    filler = _Filler(model, dtype, device, on_ready)
    filler.expect(folder, source.tensors)
    with torch.no_grad():
        for name, tensor in source:
            filler.take(name, tensor)
            # The last view of a shard would keep it mapped while the next one is opened.
            del tensor


class _Piece(NamedTuple):
    """Where a tensor of the checkpoint goes: rows [start, start + shape[0]) of the parameter `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


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
    ) -> None:
        self.model, self.dtype, self.device, self.on_ready = model, dtype, device, on_ready
        self.pieces: dict[str, _Piece] = {}
        # Tied embeddings are one target in two places.
        self.places: dict[str, list[str]] = defaultdict(list)
        self.shapes: dict[str, torch.Size] = {}
        self.requires_grad: dict[str, bool] = {}
        self.data: dict[str, Tensor] = {}
        self.placed: set[tuple[str, int]] = set()
        self.outstanding: Counter[str] = Counter()
        self.incomplete: Counter[str] = Counter()
        config = cast(Qwen2Config, model.config)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.device.type != "meta":
                raise ValueError(f"parameter {name} is on {parameter.device}: build the model on the meta device")
            target = _EMBEDDING if name == _HEAD and config.tie_word_embeddings else name
            self.places[target].append(name)
            self.shapes[target] = parameter.shape
            self.requires_grad[target] = parameter.requires_grad
            self.incomplete[_split_name(name)[0]] += 1
            for source, start, rows in _pieces_of(name, parameter.shape[0], config):
                self.pieces[source] = _Piece(target, start, (rows, *parameter.shape[1:]))

    def expect(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        """Check the tensors that are going to come; CheckpointError where they are not what the model needs."""
        left_over = [name for name in tensors if name not in self.pieces and not name.endswith(_IGNORED_SUFFIX)]
        if left_over:
            raise CheckpointError(
                f"{folder} has weights that the model of its config.json does not: {_some(left_over)}"
            )
        # Of tied parameters one name is enough.
        needed: dict[tuple[str, int], str] = {}
        for name, piece in self.pieces.items():
            needed.setdefault(piece[:2], name)
        coming = {self.pieces[name][:2] for name in tensors if name in self.pieces}
        missing = [name for place, name in needed.items() if place not in coming]
        if missing:
            raise CheckpointError(f"{folder} lacks weights that its config.json asks for: {_some(missing)}")
        for name, stored in tensors.items():
            if name not in self.pieces:
                continue
            piece = self.pieces[name]
            if stored.dtype not in _WEIGHT_DTYPES:
                raise CheckpointError(
                    f"{stored.file}: {name} is of {stored.dtype}: quantised checkpoints are not supported, use the "
                    "unquantised one"
                )
            if stored.shape != piece.shape:
                raise CheckpointError(
                    f"{stored.file}: {name} has shape {stored.shape}, config.json asks for {piece.shape}: "
                    "the two are not of the same model"
                )
            self.outstanding[piece.target] += 1

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into its place; hand over the modules that this completes."""
        if name not in self.pieces:
            return
        target, start, (rows, *_) = self.pieces[name]
        if target not in self.data:
            self.data[target] = torch.empty(self.shapes[target], dtype=self.dtype, device=self.device)
        destination = self.data[target].narrow(0, start, rows)
        if (target, start) not in self.placed:
            destination.copy_(tensor)
            self.placed.add((target, start))
        elif not _same(destination, tensor):
            raise CheckpointError(
                f"{_HEAD} and {_EMBEDDING} differ although config.json sets tie_word_embeddings: set it to false"
            )
        self.outstanding[target] -= 1
        if self.outstanding[target] == 0:
            self._install(target)

    def _install(self, target: str) -> None:
        parameter = nn.Parameter(self.data.pop(target), requires_grad=self.requires_grad[target])
        owners = [_split_name(place) for place in self.places[target]]
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
        pieces = _pieces_of(name, tensor.shape[0], config)
        if len(pieces) == 1:
            state[name] = tensor
            continue
        for source, start, rows in pieces:
            piece = tensor.narrow(0, start, rows)
            state[source] = torch.from_dlpack(piece) if piece.device.type == "cpu" else piece.cpu()
    if config.tie_word_embeddings:
        # One tensor under both names, also when lm_head holds the weight in another form.
        state[_HEAD] = state[_EMBEDDING]
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


def _pieces_of(name: str, total_rows: int, config: Qwen2Config) -> list[tuple[str, int, int]]:
    """(checkpoint name, first row, rows) of the pieces that make up the parameter `name` of the tuned model."""
    module_name, attribute = _split_name(name)
    fused = next((suffix for suffix in _FUSED if module_name.endswith(f".{suffix}")), None)
    if fused is None:
        return [(name, 0, total_rows)]
    head_dim = config.hidden_size // config.num_attention_heads
    if fused == "self_attn.qkv":
        sizes = [head_dim * heads for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    else:
        sizes = [config.intermediate_size] * 2
    if sum(sizes) != total_rows:
        raise ValueError(f"{name} has {total_rows} rows, model.config asks for {' + '.join(map(str, sizes))}")
    prefix = module_name[: -len(fused)]
    starts = (sum(sizes[:index]) for index in range(len(sizes)))
    return [(f"{prefix}{part}.{attribute}", start, rows) for part, start, rows in zip(_FUSED[fused], starts, sizes)]


def _split_name(parameter_name: str) -> tuple[str, str]:
    module_name, _, attribute = parameter_name.rpartition(".")
    return module_name, attribute


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"
