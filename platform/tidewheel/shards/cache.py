"""Shard files as local paths: those of a folder as they are, those of an object store copied once and checked."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from pathlib import Path

from blake3 import blake3

from tidewheel.errors import ShardError
from tidewheel.shards.manifest import REBUILD, ShardInfo
from tidewheel.storage import CHUNK_BYTES, Store

CACHE_BYTES = 64 << 30
"""Room for copies; those used least recently go first."""


class ShardFiles:
    """Local paths of shard files; safe for several threads, and for several processes that share a cache folder.

    Args:
        store: where the set is.
        cache: folder for copies of remote files; default: one for each user in the system's temporary folder.
        cache_bytes: copies are deleted, oldest use first, when they take more.
    """

    def __init__(self, store: Store, cache: Path | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        self._store, self._bytes = store, cache_bytes
        self._cache = cache or Path(tempfile.gettempdir(), f"tidewheel-shards-{os.getuid()}")

    @property
    def copies(self) -> bool:
        """Whether files are copies, with their hash checked."""
        return self._store.local_path("x") is None

    def path(self, shard: ShardInfo) -> Path:
        """Path of a file that has the shard's length, and, if it is a copy, its hash: a damaged copy is made anew.

        Raises:
            ShardError: the shard is missing, or its content is not what the manifest says.
        """
        local = self._store.local_path(shard.name)
        if local is None:
            return self._copy(shard)
        try:
            size = local.stat().st_size
        except FileNotFoundError:
            raise ShardError("the shard is missing", where=str(local), mend=REBUILD) from None
        if size != shard.bytes:
            raise ShardError(f"the shard has {size} bytes, its manifest says {shard.bytes}", where=str(local),
                             mend=REBUILD)
        return local

    def _copy(self, shard: ShardInfo) -> Path:
        path = self._cache / shard.name
        if _intact(path, shard):  # left by an earlier process: the disk may have damaged it since
            with contextlib.suppress(FileNotFoundError):
                # when it was used last; its time of change is what others watch that read it
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                return path
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._cache / f".tmp-{uuid.uuid4().hex}"
        try:
            self._download(shard, temporary)
            _publish(temporary, path, shard)
        finally:
            temporary.unlink(missing_ok=True)
        self._evict(keep=shard.name)
        return path

    def _download(self, shard: ShardInfo, path: Path) -> None:
        where, digest, size = self._store.at(shard.name), blake3(), 0
        try:
            with self._store.open(shard.name) as source, path.open("wb") as sink:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                    size += len(chunk)
        except FileNotFoundError:
            raise ShardError("the shard is missing", where=where, mend=REBUILD) from None
        except OSError as error:
            raise ShardError(f"cannot copy the shard to {path.parent}: {error.strerror or error}", where=where,
                             mend="free space there, or set data.cache to another folder") from None
        if size != shard.bytes or "blake3-" + digest.hexdigest() != shard.hash:
            raise ShardError(f"the shard's content ({size} bytes) is not what its manifest says ({shard.bytes} bytes, "
                             f"{shard.hash})", where=where, mend=REBUILD)

    def _evict(self, keep: str) -> None:
        """Delete copies used least recently until the rest fits; a file that is still mapped lives on till unmapped."""
        found = []
        for path in self._cache.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_atime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in found) - self._bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            if path.name != keep:
                path.unlink(missing_ok=True)
                excess -= size


def _publish(temporary: Path, path: Path, shard: ShardInfo) -> None:
    """Give a copy its name, unless another process was faster: a file that others read must not change under them."""
    try:
        os.link(temporary, path)
    except OSError:  # there is one, or the file system has no links
        if not _intact(path, shard):
            os.replace(temporary, path)


def _intact(path: Path, shard: ShardInfo) -> bool:
    try:
        if path.stat().st_size != shard.bytes:
            return False
        digest = blake3()
        with path.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return False
    return "blake3-" + digest.hexdigest() == shard.hash
