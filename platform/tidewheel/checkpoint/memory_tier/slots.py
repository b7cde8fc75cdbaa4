"""Slots: files in /dev/shm that hold one worker's state each, and the folder of one agent's slots.

A slot is a header of one page, the table of tensors (JSON), their bytes, and the run's `extra` (JSON). The step in the
header is erased first and written last, so a process that is killed in between leaves an empty slot. A file never
changes its length and is never replaced, so a process that has mapped it can read it even after it is unlinked.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.room import check_room, no_room

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "tidewheel-"
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 20
"""Slots are hashed in blocks of this length, from the end of the header on, so that a reader can check a range."""
SLOTS_PER_WORKER = 3
"""A replica may lag one snapshot behind. So a lost worker leaves snapshot i or i - 1 while the others are between i and
i + 1: they must keep i - 1 until i + 1 is complete."""
MAX_SLOTS = SLOTS_PER_WORKER + 1
"""With a local disk, one more: the slot that is being written to it keeps its content."""
REPLICA_SLOTS = 2
"""Slots for the replicas of one worker: one is complete while the next arrives."""
EXTRA_BYTES = 1 << 20
"""Space for the JSON of `extra`, whose length differs between snapshots."""
_MAGIC = 0x3130_544F_4C53_5754  # "TWSLOT01"
_STEP = 1  # index in the header


@dataclass(frozen=True)
class Content:
    """What a slot holds, according to its header."""

    step: int
    """Completed steps."""
    sequence: int
    """Index of the snapshot among those of this worker in this generation, from 1."""
    generation: int
    rank: int
    world_size: int
    table_bytes: int
    extra_start: int
    """First byte of the JSON of `extra`; the tensors end before it."""
    extra_bytes: int
    shard: int = -1
    """Index of this part among the different ones: ranks that hold copies of each other have the same. -1: unknown."""
    num_shards: int = 0
    """Number of different parts; 0: unknown."""

    @property
    def end(self) -> int:
        """The byte at which the content ends."""
        return self.extra_start + self.extra_bytes


class Slot:
    """One mapped file. The agent creates it with `create`; the worker and readers open it by its path.

    Args:
        path: an existing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR)
        try:
            self.capacity = os.fstat(file).st_size
            # populated: the page faults of the first access cost more than a copy
            self._map = mmap.mmap(file, self.capacity, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        self.bytes = memoryview(self._map)
        self._header = np.frombuffer(self._map, np.int64, 11)

    @classmethod
    def create(cls, path: Path, capacity: int) -> Slot:
        """Create a file with all its pages allocated.

        Raises:
            CheckpointError: there is not enough shared memory.
        """
        check_room(path.parent, capacity)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, capacity)
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise no_room(path.parent, capacity) from None
        finally:
            os.close(file)
        slot = cls(path)
        slot.clear()
        return slot

    def clear(self) -> None:
        """Mark the slot as empty. Call it before changing anything in the slot."""
        self._header[_STEP] = -1
        self._header[0] = _MAGIC

    def commit(self, content: Content) -> None:
        """Mark the slot as holding `content`, all of which has been written."""
        self._header[2:11] = (content.sequence, content.generation, content.rank, content.world_size,
                              content.table_bytes, content.extra_start, content.extra_bytes,
                              content.shard, content.num_shards)
        self._header[_STEP] = content.step

    def content(self) -> Content | None:
        """Return what the slot holds; None while it is empty or being written."""
        magic, step, *values = (int(value) for value in self._header[:11])
        if magic != _MAGIC or step < 0:
            return None
        content = Content(step, *values)
        ordered = 0 <= content.table_bytes <= content.extra_start - HEADER_BYTES and content.extra_bytes >= 0
        return content if ordered and content.end <= self.capacity else None

    def hashes(self, end: int) -> np.ndarray:
        """Return the hash of each block of the content that ends at byte `end`: uint64 [blocks]."""
        return hash_blocks(self.bytes[HEADER_BYTES:end])

    def unlink(self) -> None:
        """Delete the file; its memory is freed when no process maps it any more."""
        self.path.unlink(missing_ok=True)


def num_blocks(end: int) -> int:
    """Return the number of blocks of the content that ends at byte `end`."""
    return -(-(end - HEADER_BYTES) // BLOCK_BYTES)


def block_of(byte: int) -> int:
    """Return the index of the block that a byte of the content is in."""
    return (byte - HEADER_BYTES) // BLOCK_BYTES


def block_range(first: int, last: int, end: int) -> tuple[int, int]:
    """Return the byte range [start, end) of blocks `first` to `last`.

    Args:
        first: index of a block.
        last: index of a block, included.
        end: the byte at which the content ends.
    """
    return HEADER_BYTES + first * BLOCK_BYTES, min(HEADER_BYTES + (last + 1) * BLOCK_BYTES, end)


def hash_blocks(data: memoryview) -> np.ndarray:
    """Return the xxh3 of each block of `data`, which begins at a block: uint64 [blocks].

    The hash detects damage. It need not withstand forgery, because only this user can write to the slots.
    """
    return np.array([xxhash.xxh3_64_intdigest(data[start:start + BLOCK_BYTES])
                     for start in range(0, len(data), BLOCK_BYTES)], dtype=np.uint64)


class Folder:
    """The folder of one agent's slots, locked while the agent lives so that `sweep` recognizes what dead agents left.

    Args:
        run: a short name for the folder.
        root: the folder of shared memory.
    """

    def __init__(self, run: str, root: Path = SHARED_MEMORY) -> None:
        self.path = root / f"{PREFIX}{run}-{uuid.uuid4().hex[:12]}"
        new = root / f".{self.path.name}"  # locked before it gets the name that `sweep` looks for
        new.mkdir(0o700)
        self._lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path)
        self._number = 0

    def new(self, capacity: int) -> Slot:
        """Create another slot.

        Raises:
            CheckpointError: there is not enough shared memory.
        """
        self._number += 1
        return Slot.create(self.path / f"slot-{self._number:06d}", capacity)

    def remove(self) -> None:
        """Delete the folder with all slots."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(root: Path = SHARED_MEMORY) -> list[str]:
    """Delete the folders of dead agents of any run; return their names."""
    deleted = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # another user's, or being deleted by another sweep
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its agent lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            deleted.append(folder.name)
        finally:
            os.close(lock)
    return deleted
