"""Rows of stored tensors, read and written in small chunks: a checkpoint of any size in a few megabytes of memory.

Rows of a tensor lie one after the other in a safetensors file (format: https://github.com/huggingface/safetensors),
so joining and cutting tensors by rows is copying byte ranges; torch is imported only where the rows are changed or
compared, or come from a .bin file. The library's own writer wants all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npu_tuned_model.checkpoint_dtypes import Dtype
from npu_tuned_model.checkpoint_files import StoredTensor, WeightSource, read_file
from npu_tuned_model.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Elements of a chunk: large enough for the disk, small beside any tensor of a large model.
CHUNK_ELEMENTS = 4 * 2**20
# Bytes copied at a time: they go from the page cache to the page cache through the processor's own cache.
_COPIED_BYTES = 128 * 2**10
# Bytes between two reports of progress.
_REPORTED_BYTES = 8 * 2**20
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
    dtype: Dtype
    rows: list[Rows]
    change: Callable[[Tensor], Tensor] | None = None

    def made_of(self, chunk: Tensor) -> Tensor:
        """What becomes of a few rows."""
        return (chunk if self.change is None else self.change(chunk)).to(self.dtype.in_torch)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RowReader:
    """Reads rows of a checkpoint's tensors. A context manager: one file is open at a time."""

    def __init__(self, source: WeightSource) -> None:
        self._tensors = source.tensors
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

    def portions(self, rows: Rows, dtype: Dtype) -> Iterator[memoryview] | None:
        """The bytes of `rows`, a few at a time; each portion is valid until the next.

        None where they don't lie in the file as `dtype`.
        """
        stored = self._tensors[rows.source]
        if stored.start is None or stored.dtype != dtype:
            return None
        return self._portions(stored, stored.start, rows)

    def _portions(self, stored: StoredTensor, start: int, rows: Rows) -> Iterator[memoryview]:
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        position, left = start + rows.start * row_bytes, rows.length * row_bytes
        while left:
            portion = self._bytes(stored.file, position, min(_COPIED_BYTES, left))
            yield portion
            position, left = position + len(portion), left - len(portion)

    def _read(self, name: str, start: int, count: int) -> Tensor:
        import torch

        stored = self._tensors[name]
        if stored.start is None:
            self._open(stored.file)
            return self._loaded[name].narrow(0, start, count).contiguous()
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        found = self._bytes(stored.file, stored.start + start * row_bytes, count * row_bytes)
        return torch.frombuffer(found, dtype=stored.dtype.in_torch).view(count, *stored.shape[1:])

    def _bytes(self, file: Path, position: int, size: int) -> memoryview:
        """Bytes of a safetensors file, in the buffer that the next ones will overwrite."""
        self._open(file)
        assert self._stream is not None
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        found = memoryview(self._buffer)[:size]
        self._stream.seek(position)
        if self._stream.readinto(found) != size:
            raise CheckpointError(f"{file} ended early, it was changed while it was read: start again")
        return found

    def _open(self, path: Path) -> None:
        if path == self._path:
            return
        self._close()
        if path.suffix == ".safetensors":
            self._stream = FileIO(path)
        else:
            self._loaded = dict(read_file(path))
        self._path = path

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._path, self._stream, self._loaded = None, None, {}


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
            "dtype": tensor.dtype.code,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with FileIO(path, "w") as stream:
        _write_all(stream, memoryview(len(text).to_bytes(8, "little") + text))
        unreported = 0
        portions = (portion for tensor in tensors for rows in tensor.rows for portion in _made(tensor, rows, reader))
        for portion in portions:
            _write_all(stream, portion)
            unreported += len(portion)
            if unreported >= _REPORTED_BYTES:
                on_bytes(unreported)
                unreported = 0
        on_bytes(unreported)


def _made(tensor: NewTensor, rows: Rows, reader: RowReader) -> Iterator[memoryview]:
    """The bytes of what becomes of `rows` in a new tensor, a few at a time."""
    copied = reader.portions(rows, tensor.dtype) if tensor.change is None else None
    if copied is not None:
        yield from copied
        return
    import torch

    for chunk in reader.chunks(rows):
        data: Any = tensor.made_of(chunk).view(-1).view(torch.uint8).numpy()
        yield memoryview(data)


def _write_all(stream: FileIO, data: memoryview) -> None:
    # An unbuffered stream may write less than it was given.
    while data:
        data = data[stream.write(data) :]
