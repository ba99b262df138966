"""Rows of stored tensors, read and written in small chunks: a checkpoint of any size in a few megabytes of memory.

Rows of a tensor lie one after the other in a safetensors file (format: https://github.com/huggingface/safetensors),
so joining and cutting tensors by rows is copying byte ranges. The library's own writer wants all tensors of a file in
memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_tuned_model.checkpoint_files import WeightSource, read_file
from npu_tuned_model.errors import CheckpointError

# Elements of a chunk: large enough for the disk, small beside any tensor of a large model.
CHUNK_ELEMENTS = 4 * 2**20
_DTYPE_NAMES = {
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8


class Rows(NamedTuple):
    """Rows [start, start + length) of a stored tensor."""

    source: str
    start: int
    length: int


class NewTensor(NamedTuple):
    """A tensor to be written: rows of others, one after the other, each given to `change` if there is one, as `dtype`.

    `change` makes of a few rows as many, each for itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: list[Rows]
    change: Callable[[Tensor], Tensor] | None = None

    def made_of(self, chunk: Tensor) -> Tensor:
        """What becomes of a few rows."""
        return (chunk if self.change is None else self.change(chunk)).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RowReader:
    """Reads rows of a checkpoint's tensors. A context manager: one file is open at a time."""

    def __init__(self, source: WeightSource) -> None:
        self._tensors = source.tensors
        self._offsets: dict[Path, dict[str, int]] = {}
        self._path: Path | None = None
        self._stream: FileIO | None = None
        self._loaded: dict[str, Tensor] = {}
        self._buffer = bytearray()

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def chunks(self, rows: Rows, count: int | None = None) -> Iterator[Tensor]:
        """Tensors of a few rows each, which together are `rows`, in the stored dtype; each valid until the next.

        Args:
            count: rows of a chunk (the last may have fewer); by default what CHUNK_ELEMENTS have room for.
        """
        shape = self._tensors[rows.source].shape
        step = count or max(CHUNK_ELEMENTS // math.prod(shape[1:]), 1)
        for start in range(rows.start, rows.start + rows.length, step):
            yield self._read(rows.source, start, min(step, rows.start + rows.length - start))

    def _read(self, name: str, start: int, count: int) -> Tensor:
        stored = self._tensors[name]
        self._open(stored.file)
        if self._stream is None:
            return self._loaded[name].narrow(0, start, count).contiguous()
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        size = count * row_bytes
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        self._stream.seek(self._offsets[stored.file][name] + start * row_bytes)
        if self._stream.readinto(memoryview(self._buffer)[:size]) != size:
            raise CheckpointError(f"{stored.file} ended early, it was changed while it was read: start again")
        flat = torch.frombuffer(self._buffer, dtype=stored.dtype, count=size // stored.dtype.itemsize)
        return flat.view(count, *stored.shape[1:])

    def _open(self, path: Path) -> None:
        if path == self._path:
            return
        self._close()
        if path.suffix == ".safetensors":
            self._stream = FileIO(path)
            if path not in self._offsets:
                self._offsets[path] = _data_offsets(self._stream)
        else:
            self._loaded = dict(read_file(path))
        self._path = path

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._path, self._stream, self._loaded = None, None, {}


def _data_offsets(stream: FileIO) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file (which WeightSource has checked)."""
    size = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def write_safetensors(
    path: Path, tensors: Iterable[NewTensor], reader: RowReader, on_bytes: Callable[[int], None]
) -> None:
    """Write one safetensors file, chunk by chunk; `on_bytes` is told how many bytes of tensors were written.

    Raises:
        OSError: when it can't be written.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with FileIO(path, "w") as stream:
        _write_all(stream, memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors:
            for rows in tensor.rows:
                for chunk in reader.chunks(rows):
                    data: Any = tensor.made_of(chunk).view(-1).view(torch.uint8).numpy()
                    _write_all(stream, memoryview(data))
                    on_bytes(len(data))


def _write_all(stream: FileIO, data: memoryview) -> None:
    # An unbuffered stream may write less than it was given.
    while data:
        data = data[stream.write(data) :]
