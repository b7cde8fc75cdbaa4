"""Folders for caches and temporary files that only this user can write, and the removal of what killed runs left.

    folder = user_folder("shards")                  # the same for all runs of this user on this machine
    with temporary_folder("train") as folder:       # of this run; a later run removes it if this one is killed

Other users of a machine may make a folder under a name that we will use, or replace files in one that they can write.
So every folder is looked at before it is used: it must belong to this user, be no link, and be writable by nobody else.
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
    """Return whether a folder is this user's, is no link, and nobody else can write it; nor read it, if `secret`."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = 0o077 if secret else 0o022
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others


def make_private(path: Path, *, secret: bool = False) -> bool:
    """Make a folder, and those above it that are missing, with mode 0700; return whether it `is_private` now."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return is_private(path, secret=secret)


def private_folder(path: Path) -> Path:
    """Return the folder `path`; where others can write it, a folder of this user's own in it.

    Raises:
        StorageError: someone else has made that one, or it cannot be made.
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
        StorageError: someone else has made it, or it cannot be made.
    """
    path = Path(tempfile.gettempdir(), f"tidewheel-{kind}-{os.getuid()}")
    if make_private(path):
        return path
    raise _refused(path)


def _refused(path: Path) -> StorageError:
    return StorageError("the folder cannot be used: it must belong to this user and be writable by nobody else",
                        where=str(path), fix="remove it if you made it; else set another folder (data.cache for "
                                             "shards, TMPDIR for all)")


def create_file(path: Path) -> int:
    """Return a descriptor of a new file that only this user can read and write."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)


def create_locked(path: Path) -> int:
    """Return a descriptor as `create_file` does; nobody sees the file under its name before it is locked."""
    new = path.with_name(f"new{path.name}")
    descriptor = create_file(new)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.replace(new, path)
    return descriptor


def open_file(path: Path) -> int:
    """Return a descriptor of a file of this user, for reading.

    Raises:
        OSError: there is none, it is a link, or someone else can write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not this user's alone")


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder of mode 0700 for the block, and remove it afterwards, with all that is in it."""
    path = make_temporary(kind)
    with held(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def make_temporary(kind: str) -> Path:
    """Make a temporary folder of mode 0700, and remove those whose processes were killed."""
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
    """Return a descriptor that keeps others from removing the folder as long as it is open."""
    return create_locked(path / _ALIVE)


def remove_abandoned(*more: Path) -> list[Path]:
    """Remove this user's temporary folders whose processes ended without doing so; return them.

    Args:
        more: folders to look in beside the system's temporary folder.
    """
    removed = []
    for place in {Path(tempfile.gettempdir()), *more}:
        for path in sorted(place.glob("*")):
            if path.name.startswith(_PREFIXES) and is_private(path) and _is_abandoned(path / _ALIVE):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    """Return whether a file is there that a process had locked, and none has."""
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
    """Remove the files of killed processes from a folder: those that match, and that no process has locked."""
    for path in folder.glob(pattern):
        if _is_abandoned(path):
            path.unlink(missing_ok=True)
