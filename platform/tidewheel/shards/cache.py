"""Shard files as local paths: those of a folder as they are, those of an object store copied once and checked."""

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
"""Room for copies; those used least recently go first."""


class ShardFiles:
    """Local paths of shard files; safe for several threads, and for several processes that share a cache folder.

    Args:
        store: where the set is.
        cache: folder for copies of remote files, or for a folder with them where other users can write to it;
            default: one for each user in the system's temporary folder.
        cache_bytes: copies are deleted, oldest use first, when they take more.
    """

    def __init__(self, store: Store, cache: Path | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        self._store, self._bytes, self._cache = store, cache_bytes, cache

    @property
    def copies(self) -> bool:
        """Whether files are copies, with their hash checked."""
        return self._store.local_path("x") is None

    @contextlib.contextmanager
    def opened(self, shard: ShardInfo) -> Iterator[tuple[Path, Path]]:
        """Yield (where the shard's file is, a path to read it from that is good during the block).

        The file has the shard's length. A copy has its hash too, taken from the very file that the second path opens:
        whoever replaces the copy by another file after that changes nothing. A damaged copy is made anew.

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
            raise ShardError("the shard is missing", where=str(local), mend=REBUILD) from None
        if size != shard.bytes:
            raise ShardError(f"the shard has {size} bytes, its manifest says {shard.bytes}", where=str(local),
                             mend=REBUILD)
        yield local, local

    def _folder(self) -> Path:
        return private_folder(self._cache) if self._cache else user_folder("shards")

    def _copy(self, folder: Path, shard: ShardInfo) -> int:
        """Return a descriptor of the copy."""
        path = folder / shard.name
        descriptor = _intact(path, shard)  # left by an earlier process: the disk may have damaged it since
        if descriptor is not None:
            # when it was used last; its time of change is what others watch that read it
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
                                 f"bytes, {shard.hash})", where=where, mend=REBUILD)
            logger.debug("copied the shard %s, %d bytes", where, size)
            return descriptor
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
                path.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                raise ShardError("the shard is missing", where=where, mend=REBUILD) from None
            if isinstance(error, OSError):
                raise ShardError(f"cannot copy the shard to {path.parent}: {error.strerror or error}", where=where,
                                 mend="free space there, or set data.cache to another folder") from None
            raise

    def _evict(self, folder: Path, keep: str) -> None:
        """Delete copies used least recently until the rest fits; a file that is still mapped lives on till unmapped."""
        found = []
        for path in folder.glob("*.arrow"):
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


def _publish(temporary: Path, path: Path, shard: ShardInfo, descriptor: int) -> int:
    """Give a copy its name, unless another process was faster: a file that others read must not change under them.
    Return the descriptor of the file that has the name."""
    try:
        os.link(temporary, path)
    except OSError:  # there is one, or the file system has no links
        if (other := _intact(path, shard)) is not None:
            os.close(descriptor)
            return other
        os.replace(temporary, path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return descriptor


def _intact(path: Path, shard: ShardInfo) -> int | None:
    """Return a descriptor of a copy whose content has the shard's hash; None where there is none."""
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
        pass  # as good as damaged: it is copied again
    os.close(descriptor)
    return None
