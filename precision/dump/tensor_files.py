"""Writing tensors to files in the background, within a fixed amount of memory, each content once."""

from __future__ import annotations

import contextvars
import os
import queue
import shutil
import threading
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from precision.dump.known_tensors import KnownTensors, dense
from precision.errors import PrecisionError

# Bytes of copies that may wait to be written.
MEMORY_LIMIT = 192 << 20
# From this size on a tensor is written at once, without a copy.
DIRECT_BYTES = 48 << 20
WRITERS = 2
# zlib's level with `compress`: 6 makes bfloat16 weights one hundredth smaller, in four times the time.
COMPRESSION = 2


class TensorFiles:
    """Saves tensors as <folder>/<name>.pt; a content that was saved before becomes a hard link to its file.

    Args:
        compress: deflate the entries of each file's archive. torch.load reads such files as any other (but not with
            mmap=True); writing them is bound by the processor, not by the disk.

    Attributes:
        written, linked, copied: numbers of files; bytes_written: of new files.
        failure: the first error that kept a file from being written.
    """

    def __init__(self, *, compress: bool = False) -> None:
        self._compress = compress
        self.written = self.linked = self.copied = self.bytes_written = 0
        self.failure: str | None = None
        self.failed: set[str] = set()
        self._known: KnownTensors[Path] = KnownTensors(same_layout=True, devices_across_steps=True)
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._jobs: queue.SimpleQueue[tuple[Tensor, Path, int] | None] = queue.SimpleQueue()
        self._links: list[tuple[Path, Path]] = []
        self._threads: list[threading.Thread] = []
        self._checksums: bool | None = None

    def save(self, tensor: Tensor, path: Path) -> None:
        """Save the tensor as it is now; returns before the file is there. Errors are noted in `failure`."""
        if self.failure is not None:
            self.failed.add(path.name)
            return
        self._choose_checksums()
        earlier = self._known.get(tensor)
        if earlier is not None and earlier.name not in self.failed:
            self._links.append((earlier, path))
            return
        values = dense(tensor)
        own_memory = values.device != tensor.device or values.data_ptr() != _address(tensor)
        size = values.numel() * values.element_size()
        if size >= DIRECT_BYTES:
            self._write(_compact(values.cpu()), path)
        else:
            self._reserve(size)
            host = values.cpu()
            if not own_memory and host.device == values.device:
                host = host.clone()
            self._start_threads()
            self._jobs.put((_compact(host), path, size))
        self._known.put(tensor, path)

    def forget(self, tensor: Tensor) -> None:
        """See KnownTensors.forget."""
        self._known.forget(tensor)

    def finish(self) -> None:
        """Wait until every file and link is on disk."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._checksums is not None:
            torch.serialization.set_crc32_options(self._checksums)
            self._checksums = None
        links, self._links = self._links, []
        for source, path in links:
            self._link(source, path)
        self._known.next_step()

    def _choose_checksums(self) -> None:
        """Until finish(), for all of torch.save: torch.load reads no checksums, and they take half the time.

        Compressing reads them.
        """
        if self._checksums is None and hasattr(torch.serialization, "set_crc32_options"):
            self._checksums = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(self._compress)

    def _reserve(self, size: int) -> None:
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes + size <= MEMORY_LIMIT or self._waiting_bytes == 0)
            self._waiting_bytes += size

    def _start_threads(self) -> None:
        if not self._threads:
            # newer releases of torch keep the option about checksums per context
            contexts = [contextvars.copy_context() for _ in range(WRITERS)]
            self._threads = [threading.Thread(target=each.run, args=(self._work,), daemon=True) for each in contexts]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            tensor, path, size = job
            self._write(tensor, path)
            del tensor, job
            with self._room:
                self._waiting_bytes -= size
                self._room.notify_all()

    def _write(self, tensor: Tensor, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.part")
        try:
            torch.save(tensor, temporary)
            if self._compress:
                _deflate(temporary)
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError of its archive writer
            self._fail(path, error)
            temporary.unlink(missing_ok=True)
            return
        with self._room:
            self.written += 1
            self.bytes_written += path.stat().st_size

    def _link(self, source: Path, path: Path) -> None:
        if source.name in self.failed:
            self.failed.add(path.name)
            return
        try:
            path.unlink(missing_ok=True)
            os.link(source, path)
            self.linked += 1
        except OSError:
            # a file system without hard links, or too many links to one file
            try:
                shutil.copyfile(source, path)
                self.copied += 1
                self.bytes_written += path.stat().st_size
            except OSError as error:
                self._fail(path, error)

    def _fail(self, path: Path, error: Exception) -> None:
        with self._room:
            self.failed.add(path.name)
            if self.failure is None:
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
                free = shutil.disk_usage(path.parent).free
                self.failure = f"{path} could not be written ({reason}; {free >> 20} MB free)"


def raise_failure(files: TensorFiles) -> None:
    """Raise PrecisionError when a file could not be written."""
    if files.failure is not None:
        raise PrecisionError(
            f"{files.failure}; make room, or set on_write_error to 'continue' to go on without tensors"
        )


def _deflate(path: Path) -> None:
    """Write the archive anew with compressed entries."""
    smaller = path.with_name(f"{path.name}.deflated")
    try:
        with (
            zipfile.ZipFile(path) as archive,
            zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as target,
        ):
            for name in archive.namelist():
                with archive.open(name) as source, target.open(name, "w") as entry:
                    shutil.copyfileobj(source, entry, 1 << 20)
        os.replace(smaller, path)
    except OSError:
        smaller.unlink(missing_ok=True)
        raise


def _compact(host: Tensor) -> Tensor:
    """The same values in memory of their own: torch.save writes a view's whole storage."""
    if host.untyped_storage().nbytes() != host.numel() * host.element_size():
        host = host.clone()
    return host.detach()


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0
