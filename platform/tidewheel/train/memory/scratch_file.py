"""Files on a local disk that hold tensors for this process alone.

A file has no name: it is unlinked as soon as it is open, so its space is free again when the process ends, however it
ends. It can be used in two ways. As a tensor, whose pages the system reads and drops as it likes; and by direct reads
and writes of aligned pieces, which pass the system's cache by and reach the disk's own speed.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidewheel.disk_errors import readable, writable
from tidewheel.errors import StorageError

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Direct reads and writes take places, sizes and addresses in multiples of a disk's block; this is one of any disk."""
BLOCK = 4 << 20
"""Bytes of one read or write. A larger transfer is several at once, which keeps the disk's queue filled."""
THREADS = 8

_folders: weakref.WeakValueDictionary[int, _Mapped] = weakref.WeakValueDictionary()
"""Mapped files by the address of their first byte."""


class _Mapped:
    """A mapped file.

    Args:
        folder: of the file.
        size: in bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size


class Transfer:
    """A read or write that is under way.

    Args:
        blocks: its parts.
    """

    def __init__(self, blocks: Sequence[Future[None]]) -> None:
        self._blocks = blocks

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            StorageError: the disk is full or failed.
        """
        for block in self._blocks:
            block.result()

    def done(self) -> bool:
        """Return whether `wait` returns at once."""
        return all(block.done() for block in self._blocks)


class DirectFile:
    """A file without a name, that is read and written by pieces.

    Args:
        folder: a folder on a local disk; it is created.
        size: in bytes, a multiple of `ALIGNMENT`, more than 0.

    Attributes:
        size: in bytes.
        direct: whether reads and writes pass the system's cache by.

    Raises:
        StorageError: there is not enough space, or the folder cannot be written.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self._path = folder
        path, handle = _created(folder, size)
        try:
            self._named(path)
            self.direct = True
            direct = _open_direct(path)
            if direct is None:
                self.direct = False
                logger.warning("%s takes no direct reads and writes (O_DIRECT): they pass the system's cache", folder)
        finally:
            os.unlink(path)
        self._allocating = handle
        self._handle = handle if direct is None else direct
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="scratch-file")
        self._close = weakref.finalize(self, _closed, {self._allocating, self._handle}, self._threads)

    def _named(self, path: str) -> None:
        """Do what needs the file's name, while it has one."""

    def grow(self, size: int) -> None:
        """Allocate space up to a size; a smaller one changes nothing.

        Args:
            size: in bytes, a multiple of `ALIGNMENT`.

        Raises:
            StorageError: there is not enough space.
        """
        if size > self.size:
            _allocate(self._allocating, self._path, self.size, size)
            self.size = size

    def read(self, place: int, into: torch.Tensor) -> Transfer:
        """Start to read.

        Args:
            place: first byte in the file, a multiple of `ALIGNMENT`.
            into: `buffer` or a slice of one, of whole `ALIGNMENT`s; it must not be used until the transfer is done.
        """
        return self._start(_read, place, into)

    def write(self, place: int, source: torch.Tensor, after: Callable[[], None] | None = None) -> Transfer:
        """Start to write.

        Args:
            place: first byte in the file, a multiple of `ALIGNMENT`.
            source: `buffer` or a slice of one, of whole `ALIGNMENT`s; it must not change until the transfer is done.
            after: returns when `source` has its values; each of the file's threads calls it. Default: it has them.
        """
        return self._start(_write if after is None else partial(_write_after, after), place, source)

    def close(self) -> None:
        """Wait for all transfers and free the space, once no tensor uses it."""
        self._close()

    def _start(self, move: Any, place: int, memory: torch.Tensor) -> Transfer:
        data = memoryview(memory.numpy().data)
        return Transfer([self._threads.submit(move, self._handle, place + start, data[start:start + BLOCK], self._path)
                         for start in range(0, len(data), BLOCK)])


class ScratchFile(DirectFile):
    """A file without a name, of a fixed size, that is also a tensor.

    Attributes:
        tensor: uint8 [size], the contents; zero at first.
    """

    def _named(self, path: str) -> None:
        self.tensor = _map(path, self._path, self.size)


def buffer(size: int, pinned: bool = False) -> torch.Tensor:
    """Return memory for transfers, uint8 [size], whose address is a multiple of `ALIGNMENT`.

    Args:
        size: in bytes.
        pinned: whether a GPU copies from and to it without another copy.
    """
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start:start + size]


def folder_of(tensor: torch.Tensor) -> Path | None:
    """Return the folder of the scratch file that holds a tensor; None: it is in memory."""
    mapped = _folders.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
    return None if mapped is None else mapped.folder


def empty_like(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return a contiguous tensor of the same shape in a scratch file of its own.

    Args:
        tensor: whose shape and dtype it has; not empty.
        folder: on a local disk.

    Raises:
        StorageError: there is not enough space.
    """
    size = rounded(tensor.numel() * tensor.element_size())
    path, handle = _created(folder, size)
    try:
        whole = _map(path, folder, size)
    finally:
        os.close(handle)
        os.unlink(path)
    return whole[:tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


def rounded(size: int) -> int:
    """Return a size rounded up to whole `ALIGNMENT`s."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _created(folder: Path, size: int) -> tuple[str, int]:
    """Create a file with its space allocated; return its path and handle.

    Raises:
        StorageError: see `ScratchFile`.
    """
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=".tidewheel-", dir=folder)
    try:
        _allocate(handle, folder, 0, size)
    except StorageError:
        os.close(handle)
        os.unlink(path)
        raise
    return path, handle


def _allocate(handle: int, folder: Path, start: int, end: int) -> None:
    """Allocate the space of a file from byte `start` to byte `end`.

    Raises:
        StorageError: there is not enough space.
    """
    try:
        os.posix_fallocate(handle, start, end - start)  # a page that finds the disk full later would kill the process
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(f"cannot allocate a file: {error.strerror}", where=str(folder),
                               fix="give a folder on a local disk") from None
        free = shutil.disk_usage(folder).free
        more = f"{start / 1e9:.2f} of them allocated, " if start else ""
        raise StorageError(f"this rank needs {end / 1e9:.2f} GB on disk, {more}{free / 1e9:.2f} are free",
                           where=str(folder),
                           fix="free some space there, name a larger disk (memory.optimizer_disk, "
                               "memory.activation_disk), or shard over more workers") from None


def _map(path: str, folder: Path, size: int) -> torch.Tensor:
    tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    mapped = _Mapped(folder, size)
    _folders[storage.data_ptr()] = mapped
    weakref.finalize(storage, lambda held: None, mapped)  # the entry lives as long as the storage
    return tensor


def _open_direct(path: str) -> int | None:
    """Return a handle for direct reads and writes; None: the file system refuses them."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, ALIGNMENT) as probe:
            os.preadv(handle, [probe], 0)
    except OSError:
        os.close(handle)
        return None
    return handle


def _closed(handles: set[int], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=True)
    for handle in handles:
        os.close(handle)


def _read(handle: int, place: int, data: memoryview, where: Path) -> None:
    with readable(where):
        while len(data):
            done = os.preadv(handle, [data], place)
            if not done:
                raise OSError(errno.EIO, "the file ends early")
            data, place = data[done:], place + done


def _write_after(after: Callable[[], None], handle: int, place: int, data: memoryview, where: Path) -> None:
    after()
    _write(handle, place, data, where)


def _write(handle: int, place: int, data: memoryview, where: Path) -> None:
    with writable(where):
        while len(data):
            done = os.pwritev(handle, [data], place)
            data, place = data[done:], place + done
