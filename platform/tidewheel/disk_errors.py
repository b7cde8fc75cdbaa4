"""What the operating system says about a file, as errors that a person can act on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel import time_limit
from tidewheel.errors import StorageAwayError, StorageError


class Guarded:
    """A file object whose write errors are told as ours."""

    def __init__(self, sink: BinaryIO, path: Path) -> None:
        self._sink, self._path = sink, path

    def write(self, data: Any, /) -> int:
        time_limit.current().check()
        with writable(self._path):
            return self._sink.write(data)


@contextlib.contextmanager
def closing(sink: BinaryIO, path: Path) -> Iterator[None]:
    """Close `sink` behind the block. What it still holds is written then, and a full disk says so once more: that must
    not take the place of the error that the block raised."""
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
    """Missing files stay FileNotFoundError; what else the system says becomes a StorageError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise StorageError("this is a folder, not a file", where=str(path), mend="give the path of a file") from None
    except PermissionError:
        raise StorageError("no permission to read", where=str(path), mend="change its owner or its mode") from None
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=str(path), mend="check the disk") from None


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """What the system says while `path` is written becomes a StorageError with a fix."""
    try:
        yield
    except PermissionError:
        raise StorageError("no permission to write", where=str(path),
                           mend="choose another output folder, or change its owner") from None
    except OSError as error:
        what, mend = f"cannot write: {error.strerror}", "check free space and that the path is a folder you own"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "free some space there, or raise the quota; checkpoint.keep_last says how many checkpoints stay"
        elif error.errno == errno.EROFS:
            mend = "mount the file system for writing: it is read-only, which a failing disk can make it"
        elif error.errno in _AWAY:
            raise StorageAwayError(what, where=str(path), mend="mount the file system again") from None
        raise StorageError(what, where=str(path), mend=mend) from None


_AWAY = (errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN)
"""What a network file system says whose server is away."""


def unlistable(error: OSError) -> None:
    """What `os.walk` tells: a folder that is not there is empty, anything else a StorageError."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise StorageError(f"cannot list: {error.strerror}", where=str(error.filename),
                           mend="change the folder's owner or mode")
