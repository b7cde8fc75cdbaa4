"""Folders for caches and temporary files that only this user can write, and the cleanup after killed runs.

    folder = user_folder("shards")                  # shared by all runs of this user on this machine
    with temporary_folder("train") as folder:       # for this run; a later run removes it if this one is killed

Other users of a machine may create a folder under a name that Tidewheel will use, or replace files in a folder that
they can write. So each folder is checked before use: it must belong to this user, must not be a link, and must not be
writable by others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tidewheel.errors import StorageError

_ALIVE = ".alive"
_PREFIXES = ("tidewheel-", "tw-")


def is_private(path: Path, *, secret: bool = False) -> bool:
    """Return whether a folder is this user's, is no link, and others cannot write it (nor read it, if `secret`)."""
    try:
        status = path.lstat()
    except OSError:
        return False
    forbidden = 0o077 if secret else 0o022
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & forbidden


def make_private(path: Path, *, secret: bool = False) -> bool:
    """Create a folder and its missing parents with mode 0700; return whether it `is_private` now."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return is_private(path, secret=secret)


def private_folder(path: Path) -> Path:
    """Return the folder `path`, or a folder of this user inside it if others can write to `path`.

    Raises:
        StorageError: that folder belongs to another user or cannot be created.
    """
    path = path.resolve()
    if make_private(path):
        return path
    own = path / f"tidewheel-{os.getuid()}"
    if make_private(own):
        return own
    raise _refused(own)


def user_folder(kind: str) -> Path:
    """Return this user's folder for `kind` in the system's temporary folder.

    Raises:
        StorageError: the folder belongs to another user or cannot be created.
    """
    path = Path(tempfile.gettempdir(), f"tidewheel-{kind}-{os.getuid()}")
    if make_private(path):
        return path
    raise _refused(path)


def _refused(path: Path) -> StorageError:
    return StorageError("the folder cannot be used: it must belong to this user, and only this user may write to it",
                        where=str(path), fix="remove it if it is yours; otherwise choose another folder (data.cache "
                                             "for shards, TMPDIR for everything)")


def create_file(path: Path) -> int:
    """Create a file that only this user can read and write; return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)


def create_locked(path: Path) -> int:
    """Create a file like `create_file`, locked before it appears under its name; return its descriptor."""
    new = path.with_name(f"new{path.name}")
    descriptor = create_file(new)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.replace(new, path)
    return descriptor


def open_file(path: Path) -> int:
    """Open a file of this user for reading; return its descriptor.

    Raises:
        PermissionError: the file belongs to another user, or others can write it.
        OSError: the file is missing or a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} belongs to another user, or others can write it")


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Create a folder with mode 0700 for the block, and remove it with its content afterwards."""
    path = make_temporary(kind)
    with held(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def make_temporary(kind: str) -> Path:
    """Create a temporary folder with mode 0700, after removing those of killed processes."""
    remove_abandoned()
    return Path(tempfile.mkdtemp(prefix=f"tidewheel-{kind}-"))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from removing a folder during the block, or until this process ends."""
    descriptor = hold(path)
    try:
        yield
    finally:
        os.close(descriptor)


def hold(path: Path) -> int:
    """Return a descriptor that keeps other processes from removing the folder while it is open."""
    return create_locked(path / _ALIVE)


def remove_abandoned(*more: Path) -> list[Path]:
    """Remove this user's temporary folders that killed processes have left; return their paths.

    Args:
        more: folders to search, besides the system's temporary folder.
    """
    removed = []
    for parent in {Path(tempfile.gettempdir()), *more}:
        for path in sorted(parent.glob("*")):
            if path.name.startswith(_PREFIXES) and is_private(path) and _is_abandoned(path / _ALIVE):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    """Return whether a lock file exists that no process has locked any more."""
    try:
        descriptor = open_file(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_unlocked(folder: Path, pattern: str) -> None:
    """Remove files of killed processes from a folder: files that match `pattern` and are not locked by a process."""
    for path in folder.glob(pattern):
        if _is_abandoned(path):
            path.unlink(missing_ok=True)
