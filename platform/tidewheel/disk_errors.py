"""Turn the operating system's errors about files into StorageErrors with a fix."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel import time_limit
from tidewheel.errors import StorageAwayError, StorageError


class Guarded:
    """File object that raises StorageErrors when a write fails.

    Args:
        sink: the file.
        path: its path, for error messages.
    """

    def __init__(self, sink: BinaryIO, path: Path) -> None:
        self._sink, self._path = sink, path

    def write(self, data: Any, /) -> int:
        """Write `data` under the thread's time limit; return the number of bytes written."""
        time_limit.current().check()
        with writable(self._path):
            return self._sink.write(data)


@contextlib.contextmanager
def closing(sink: BinaryIO, path: Path) -> Iterator[None]:
    """Close `sink` after the block. Closing writes the buffer, which fails again on a full disk: that error must not
    replace the one that the block raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            sink.close()
        raise
    with writable(path):
        sink.close()


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading `path` in the block into StorageErrors.

    Raises:
        FileNotFoundError: the file is missing.
        StorageError: the file cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise StorageError("this is a folder, not a file", where=str(path), fix="give the path of a file") from None
    except PermissionError:
        raise StorageError("no permission to read", where=str(path), fix="change its owner or its mode") from None
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=str(path), fix="check the disk") from None


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the errors of writing `path` in the block into StorageErrors.

    Raises:
        StorageAwayError: the server of a network file system is unavailable.
        StorageError: the file cannot be written.
    """
    try:
        yield
    except PermissionError:
        raise StorageError("no permission to write", where=str(path),
                           fix="choose another output folder, or change its owner") from None
    except OSError as error:
        what, fix = f"cannot write: {error.strerror}", "check free space and that the path is a folder you own"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space there, or raise the quota; checkpoint.keep_last says how many checkpoints stay"
        elif error.errno == errno.EROFS:
            fix = "mount the file system for writing: it is read-only, which a failing disk can make it"
        elif error.errno in _AWAY:
            raise StorageAwayError(what, where=str(path), fix="mount the file system again") from None
        raise StorageError(what, where=str(path), fix=fix) from None


_AWAY = (errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN)
"""Errors of a network file system whose server is unavailable."""


def unlistable(error: OSError) -> None:
    """Handle an error of `os.walk`. A missing folder counts as empty.

    Raises:
        StorageError: the folder cannot be listed.
    """
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise StorageError(f"cannot list: {error.strerror}", where=str(error.filename),
                           fix="change the folder's owner or mode")
