"""Detect shard files that differ from their manifest while they are being read.

A thread hashes each file once, when it is first read. Every later read compares the file's inode, length and
modification time with those at the time of hashing. So no batch waits for a hash. `ShardSet.settle`, called before a
checkpoint, keeps what was learnt from a damaged file out of it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

from blake3 import blake3

from tidewheel.daemon import DaemonThread
from tidewheel.errors import ShardError
from tidewheel.shards.manifest import REBUILD, Manifest, ShardInfo
from tidewheel.storage import Store

Fingerprint = tuple[int, int, int]
"""Inode, length in bytes and modification time in nanoseconds of a file."""
HASH_AT_START_BYTES = 1 << 30
"""Size of a set that is hashed in about a second."""
CHANGED = "the shard changed while it was read"


class Integrity:
    """What is known about the files of one shard set. The caller holds the set's lock.

    Args:
        verify: hash files; False: only detect changes while they are read.
    """

    def __init__(self, verify: bool) -> None:
        self._verify = verify
        self._files: dict[str, tuple[Path, Fingerprint]] = {}
        self._hashes: dict[str, Future[str]] = {}
        self._thread: DaemonThread | None = None

    def opened(self, shard: ShardInfo, path: Path, before: Fingerprint, *, hashed: bool) -> None:
        """Record that a shard's file was opened, and start to hash it.

        Args:
            shard: the shard.
            path: its file.
            before: the file's fingerprint before it was opened.
            hashed: the content is already known to be intact.
        """
        if self._files.get(shard.name) == (path, before) and not hashed:
            return  # opened before and closed to make room: what is known about it still holds
        self._files[shard.name] = path, before
        self._hashes.pop(shard.name, None)
        if self._verify and not hashed:
            self._thread = self._thread or DaemonThread("shard hashes")
            self._hashes[shard.name] = self._thread.submit(problem_of, path, shard)

    def problem(self, shard: ShardInfo) -> str:
        """Return the problem with an opened shard, as far as it is known now; "" for none. Does not wait for a hash."""
        path, before = self._files[shard.name]
        try:
            if fingerprint(path) != before:
                return CHANGED
        except FileNotFoundError:
            pass  # its mapping is still valid; the cache may have evicted the file, or the set is being rewritten
        hashing = self._hashes.get(shard.name)
        if hashing is None or not hashing.done():
            return ""
        problem = hashing.result()
        if not problem:
            del self._hashes[shard.name]
        return problem

    def unsettled(self) -> list[str]:
        """Wait for all hashes and return the names of the damaged shards."""
        return [name for name, hashing in list(self._hashes.items()) if hashing.result()]

    def close(self) -> None:
        """Stop hashing, without waiting for the file that is being hashed."""
        if self._thread is not None:
            self._thread.stop(wait=False)


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a file."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def problem_of(path: Path, shard: ShardInfo) -> str:
    """Read a whole file and compare it with its manifest entry; return the problem, "" for none."""
    try:
        size = path.stat().st_size
        digest = "blake3-" + blake3().update_mmap(path).hexdigest()
    except OSError as error:
        return f"the shard cannot be read: {error.strerror or error}"
    if size != shard.bytes or digest != shard.hash:
        return (f"the shard's content ({size} bytes) is not what its manifest says ({shard.bytes} bytes, "
                f"{shard.hash})")
    return ""


def check_files(store: Store, manifest: Manifest, *, hash_bytes: int = HASH_AT_START_BYTES) -> None:
    """Check the files of a set before it is used: their lengths by one listing and, if they are small, their content.

    Args:
        store: the set's folder.
        manifest: its manifest.
        hash_bytes: read the content of local files if the set is not larger than this.

    Raises:
        ShardError: a file is missing, or its length or content differs from the manifest.
    """
    sizes = {entry.key: entry.bytes for entry in store.list()}
    small = sum(shard.bytes for shard in manifest.shards) <= hash_bytes
    for shard in manifest.shards:
        size, path = sizes.get(shard.name), store.local_path(shard.name)
        problem = ""
        if size is None:
            problem = "the shard is missing"
        elif size != shard.bytes:
            problem = f"the shard has {size} bytes, its manifest says {shard.bytes}"
        elif small and path is not None:
            problem = problem_of(path, shard)
        if problem:
            raise ShardError(problem, where=store.at(shard.name), fix=REBUILD)
