"""The weight files of a checkpoint folder: which there are, what they hold, and reading them tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

from safetensors import SafetensorError, safe_open

from npu_tuned_model.checkpoint_dtypes import BY_CODE, BY_NAME, Dtype, name_of
from npu_tuned_model.checkpoint_layout import some
from npu_tuned_model.config import first_line, read_json
from npu_tuned_model.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class StoredTensor(NamedTuple):
    """What a checkpoint says about one of its tensors.

    Attributes:
        start: where its bytes begin in the file; None in a .bin file, which only torch can read.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: Dtype
    start: Optional[int]


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
            found = _stored_tensors(file)
            if expected is not None:
                _check_index(file, expected, set(found))
            self.tensors.update(found)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in dict.fromkeys(stored.file for stored in self.tensors.values()):
            yield from read_file(file)


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
            f"{file} lacks tensors that the index lists for it: {some(expected - found)}: download it again"
        )
    if found - expected:
        raise CheckpointError(
            f"{file} holds tensors that the index does not list for it: {some(found - expected)}: "
            "index and shards are not of the same checkpoint, download them again"
        )


def _stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """What a weight file says of its tensors, in the order in which `read_file` gives them."""
    found = {}
    if file.suffix != ".safetensors":
        for name, tensor in read_file(file):
            dtype = BY_NAME.get(name_of(tensor.dtype))
            if dtype is None:
                raise not_a_weight(file, name, tensor.dtype)
            found[name] = StoredTensor(file, tuple(tensor.shape), dtype, None)
            del tensor
        return found
    with _readable(file):
        # Opening it is the library's check of the whole header, which as numpy's takes no torch.
        with safe_open(str(file), framework="np") as handle:
            names = list(handle.keys())
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    for name in names:
        entry = header[name]
        if entry["dtype"] not in BY_CODE:
            raise not_a_weight(file, name, entry["dtype"])
        start = 8 + size + entry["data_offsets"][0]
        found[name] = StoredTensor(file, tuple(entry["shape"]), BY_CODE[entry["dtype"]], start)
    return found


def not_a_weight(file: Path, name: str, dtype: object) -> CheckpointError:
    """The error for a tensor whose elements are of a type that no weight of an unquantised checkpoint has."""
    return CheckpointError(
        f"{file}: {name} is of {dtype}: quantised checkpoints are not supported, use the unquantised one"
    )


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor in a weight file; bytes are read from the disk only when a tensor is used."""
    with _readable(file):
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                for name in handle.keys():
                    yield name, handle.get_tensor(name)
        else:
            import torch

            # A str, not a Path: torch 2.1 maps nothing else.
            state = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
                raise CheckpointError(f"{file} is not a plain table of tensors: save the model's state_dict instead")
            for name in list(state):
                yield name, state.pop(name).detach()


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn what the libraries raise for a file that can't be read into a CheckpointError."""
    try:
        yield
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
