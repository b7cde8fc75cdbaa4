"""A folder of this machine as a store."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel import time_limit
from tidewheel.disk_errors import Guarded, closing, readable, unlistable, writable
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage.base import HashingWriter, Stamp, Store, Upload, Writer, safe_key

TEMPORARY_PREFIX = ".tmp-"


class LocalStore(Store):
    """A folder. Publication is write to a temporary name, fsync, rename.

    Missing folders are made. A root that this store has written to and that disappears is not made again: its disk may
    come back, and would hide what was written meanwhile.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self._written: tuple[str, tuple[int, int]] | None = None  # the newest key, and device and inode of the root
        super().__init__(str(self.root))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": None}  # another machine may see another device

    def _require_root(self) -> None:
        """Raise StorageAwayError when the folder that was written to is gone."""
        if self._written is None:
            return
        key, identity = self._written
        with contextlib.suppress(OSError):
            if _identity(self.root) == identity or self._path(key).exists():
                return
        raise StorageAwayError("the folder is gone, or another one is in its place", where=self.uri,
                               fix="mount its disk again, or move the folder back: what was written is in the "
                                   "original folder")

    @contextlib.contextmanager
    def _writable(self, path: Path) -> Iterator[None]:
        """Turn errors of writing `path` into StorageErrors. A folder that is gone is the cause of any other error."""
        try:
            with writable(path):
                yield
        except StorageError:
            self._require_root()
            raise

    def _make_folder(self, path: Path, key: str) -> None:
        """Create the folder of `path`, and identify the root before the first write into it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._written is None:
            self._written = key, _identity(self.root)

    def _path(self, key: str) -> Path:
        return self.root / safe_key(key)

    def open(self, key: str) -> BinaryIO:
        path = self._path(key)
        with readable(path):
            return path.open("rb")

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[Writer]:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._require_root()
        with self._writable(path):
            self._make_folder(path, key)
            sink = temporary.open("wb")
        try:
            with closing(sink, path):
                hashing = HashingWriter(key, Guarded(sink, path))
                yield hashing  # what the caller raises here is the caller's own and passes through
                time_limit.current().check()
                with self._writable(path):
                    sink.flush()
                    os.fsync(sink.fileno())
            with self._writable(path):
                os.replace(temporary, path)
                _fsync_folder(path.parent)
                self._written = key, _identity(self.root)
        finally:
            with contextlib.suppress(OSError):  # the error on its way says more
                temporary.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._require_root()
        with self._writable(path):
            self._make_folder(path, key)
            try:
                with temporary.open("wb") as sink:
                    sink.write(data)
                    sink.flush()
                    os.fsync(sink.fileno())  # a commit must outlive a power failure, whole
                os.link(temporary, path)
                _fsync_folder(path.parent)
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def size(self, key: str) -> int:
        path = self._path(key)
        with readable(path):
            if path.is_dir():
                raise FileNotFoundError(path)
            return path.stat().st_size

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        unfinished = []
        for path in (self._path(prefix) if prefix else self.root).rglob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # it has become its object
                unfinished.append(Upload(path.relative_to(self.root).as_posix(), "", path.stat().st_mtime))
        return unfinished

    def abort(self, upload: Upload) -> None:
        self.delete(upload.key)

    def written_at(self, key: str) -> float:
        path = self._path(key)
        with readable(path):
            return path.stat().st_mtime

    def list(self, prefix: str = "") -> Sequence[Stamp]:
        top = self._path(prefix) if prefix else self.root
        entries = []
        for folder, _, names in os.walk(top, onerror=unlistable):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted between walk and stat
                    entries.append(Stamp(path.relative_to(self.root).as_posix(), path.stat().st_size, ""))
        return sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with writable(path), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        with writable(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(path)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def fingerprint(self, key: str) -> str:
        return self.hash(key)

    def check(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create the folder: {error.strerror}", where=self.uri,
                               fix="choose another path, or change its owner") from None
        if not os.access(self.root, os.W_OK):
            raise StorageError("the folder is read-only", where=self.uri, fix="choose another path")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
