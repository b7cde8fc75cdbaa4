"""Are the shard files that are being read still what the manifest says?

A file is hashed once, by a thread, when it is first read; from then on every read compares its place on disk, length
and time of change with what they were when it was hashed. So neither the first batch nor any other waits for a hash,
and what was learnt from a file before the answer came is kept from a checkpoint by `ShardSet.settle`.
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
HASH_AT_START_BYTES = 1 << 30
"""A set of so many bytes is hashed in about a second."""
CHANGED = "the shard has changed while it was read"


class Integrity:
    """What is known about the files of one shard set; for use under the set's lock.

    Args:
        verify: hash files; False: only notice that they change.
    """

    def __init__(self, verify: bool) -> None:
        self._verify = verify
        self._files: dict[str, tuple[Path, Fingerprint]] = {}
        self._hashes: dict[str, Future[str]] = {}
        self._thread: DaemonThread | None = None

    def opened(self, shard: ShardInfo, path: Path, before: Fingerprint, *, hashed: bool) -> None:
        """`path` was opened, its fingerprint `before` that; `hashed`: its content is known to be right."""
        if self._files.get(shard.name) == (path, before) and not hashed:
            return  # opened before, closed to make room: what is known of it still holds
        self._files[shard.name] = path, before
        self._hashes.pop(shard.name, None)
        if self._verify and not hashed:
            self._thread = self._thread or DaemonThread("shard hashes")
            self._hashes[shard.name] = self._thread.submit(problem_of, path, shard)

    def problem(self, shard: ShardInfo) -> str:
        """What is known to be wrong with an opened shard now; does not wait. "": nothing."""
        path, before = self._files[shard.name]
        try:
            if fingerprint(path) != before:
                return CHANGED
        except FileNotFoundError:
            pass  # its mapping lives on: a cache may have made room, or the set is being written anew
        hashing = self._hashes.get(shard.name)
        if hashing is None or not hashing.done():
            return ""
        found = hashing.result()
        if not found:
            del self._hashes[shard.name]
        return found

    def unsettled(self) -> list[str]:
        """Names of the shards whose content is not known to be right, once all hashes are there."""
        return [name for name, hashing in list(self._hashes.items()) if hashing.result()]

    def close(self) -> None:
        """Stop hashing. A file that is being hashed is not waited for."""
        if self._thread is not None:
            self._thread.stop(wait=False)


def fingerprint(path: Path) -> Fingerprint:
    """Place on disk, length and time of change of a file."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def problem_of(path: Path, shard: ShardInfo) -> str:
    """Read the whole file; what is wrong with it, "" when it is what the manifest says."""
    try:
        size = path.stat().st_size
        found = "blake3-" + blake3().update_mmap(path).hexdigest()
    except OSError as error:
        return f"the shard cannot be read: {error.strerror or error}"
    if size != shard.bytes or found != shard.hash:
        return (f"the shard's content ({size} bytes) is not what its manifest says ({shard.bytes} bytes, "
                f"{shard.hash})")
    return ""


def check_files(store: Store, manifest: Manifest, *, hash_bytes: int = HASH_AT_START_BYTES) -> None:
    """Look at all files of a set before it is used: by one listing, and, if they lie here and are not more than
    `hash_bytes` in all, by their content.

    Raises:
        ShardError: a file is missing, has another length or another content than the manifest says.
    """
    sizes = {entry.key: entry.bytes for entry in store.list()}
    here = sum(shard.bytes for shard in manifest.shards) <= hash_bytes
    for shard in manifest.shards:
        size, path = sizes.get(shard.name), store.local_path(shard.name)
        problem = ""
        if size is None:
            problem = "the shard is missing"
        elif size != shard.bytes:
            problem = f"the shard has {size} bytes, its manifest says {shard.bytes}"
        elif here and path is not None:
            problem = problem_of(path, shard)
        if problem:
            raise ShardError(problem, where=store.at(shard.name), mend=REBUILD)
