"""Shard files as local paths: files in a folder as they are, objects copied once with their hash checked."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from tidewheel.errors import ShardError
from tidewheel.private_folders import create_locked, open_file, private_folder, remove_unlocked, user_folder
from tidewheel.shards.manifest import REBUILD, ShardInfo
from tidewheel.storage import CHUNK_BYTES, Store

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 << 30
"""Total size of the copies; the least recently used are deleted first."""


class ShardFiles:
    """Local paths of shard files. Safe to use from several threads, and from processes that share a cache folder.

    Args:
        store: the set's folder.
        cache: folder for copies of remote files. If other users can write to it, the copies go into a private folder
            inside. Default: one for each user in the system's temporary folder.
        cache_bytes: the least recently used copies are deleted when all take more than this.
    """

    def __init__(self, store: Store, cache: Path | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        self._store, self._bytes, self._cache = store, cache_bytes, cache

    @property
    def copies(self) -> bool:
        """Whether files are copies, whose hash is checked."""
        return self._store.local_path("x") is None

    @contextlib.contextmanager
    def opened(self, shard: ShardInfo) -> Iterator[tuple[Path, Path]]:
        """Yield (path of the shard's file, a path to read it from during the block).

        The file's length has been checked. The hash of a copy has been checked too, on the very file that the second
        path opens, so replacing the copy afterwards has no effect. A damaged copy is downloaded again.

        Raises:
            ShardError: the shard is missing, or its content is not what the manifest says.
        """
        local = self._store.local_path(shard.name)
        if local is None:
            folder = self._folder()
            descriptor = self._copy(folder, shard)
            try:
                yield folder / shard.name, Path(f"/dev/fd/{descriptor}")
            finally:
                os.close(descriptor)
            return
        try:
            size = local.stat().st_size
        except FileNotFoundError:
            raise ShardError("the shard is missing", where=str(local), fix=REBUILD) from None
        if size != shard.bytes:
            raise ShardError(f"the shard has {size} bytes, its manifest says {shard.bytes}", where=str(local),
                             fix=REBUILD)
        yield local, local

    def _folder(self) -> Path:
        return private_folder(self._cache) if self._cache else user_folder("shards")

    def _copy(self, folder: Path, shard: ShardInfo) -> int:
        """Return a file descriptor of the copy, downloaded unless it exists and is intact."""
        path = folder / shard.name
        descriptor = _intact(path, shard)  # an earlier process left it, and the disk may have damaged it since
        if descriptor is not None:
            # record the time of use; readers watch the modification time, so leave that alone
            os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
            return descriptor
        remove_unlocked(folder, ".tmp-*")
        temporary = folder / f".tmp-{uuid.uuid4().hex}"
        descriptor = self._download(shard, temporary)
        try:
            descriptor = _publish(temporary, path, shard, descriptor)
        finally:
            temporary.unlink(missing_ok=True)
        self._evict(folder, keep=shard.name)
        return descriptor

    def _download(self, shard: ShardInfo, path: Path) -> int:
        where, digest, size = self._store.at(shard.name), blake3(), 0
        descriptor = None
        try:
            with self._store.open(shard.name) as source:
                descriptor = create_locked(path)
                with os.fdopen(descriptor, "wb", closefd=False) as sink:
                    while chunk := source.read(CHUNK_BYTES):
                        digest.update(chunk)
                        sink.write(chunk)
                        size += len(chunk)
            if size != shard.bytes or "blake3-" + digest.hexdigest() != shard.hash:
                raise ShardError(f"the shard's content ({size} bytes) is not what its manifest says ({shard.bytes} "
                                 f"bytes, {shard.hash})", where=where, fix=REBUILD)
            logger.debug("copied the shard %s, %d bytes", where, size)
            return descriptor
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
                path.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                raise ShardError("the shard is missing", where=where, fix=REBUILD) from None
            if isinstance(error, OSError):
                raise ShardError(f"cannot copy the shard to {path.parent}: {error.strerror or error}", where=where,
                                 fix="free space there, or set data.cache to another folder") from None
            raise

    def _evict(self, folder: Path, keep: str) -> None:
        """Delete the least recently used copies until the rest fits. A mapped file stays readable."""
        copies = []
        for path in folder.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                copies.append((stat.st_atime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in copies) - self._bytes
        for _, size, path in sorted(copies):
            if excess <= 0:
                return
            if path.name != keep:
                path.unlink(missing_ok=True)
                excess -= size


def _publish(temporary: Path, path: Path, shard: ShardInfo, descriptor: int) -> int:
    """Rename a copy to its final name, unless another process already has, and return a descriptor of the named file.

    A file that other processes read must not be replaced.
    """
    try:
        os.link(temporary, path)
    except OSError:  # the name exists, or the file system has no links
        if (other := _intact(path, shard)) is not None:
            os.close(descriptor)
            return other
        os.replace(temporary, path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return descriptor


def _intact(path: Path, shard: ShardInfo) -> int | None:
    """Return a descriptor of a copy whose content has the shard's hash; None when there is no such copy."""
    try:
        descriptor = open_file(path)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size == shard.bytes:
            digest = blake3()
            with os.fdopen(descriptor, "rb", closefd=False) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
            if "blake3-" + digest.hexdigest() == shard.hash:
                return descriptor
    except OSError:
        pass  # unreadable: treat it as damaged and copy it again
    os.close(descriptor)
    return None
