"""Shared memory: files in /dev/shm that hold one worker's state each, and the folder of one agent's files.

A slot is a header of one page, the table of tensors (JSON), their bytes, and the run's `extra` (JSON). The step in the
header is written last and taken away first, so a process that is killed in between leaves a slot that says it holds
nothing. A file never changes its length or is written anew: who has mapped it may read it until the end.
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
"""Slots are hashed in blocks of this length, from the end of the header on, so that parts can be read and checked."""
_MAGIC = 0x3130_544F_4C53_5754  # "TWSLOT01"
_STEP = 1  # where in the header


@dataclass(frozen=True)
class Content:
    """What a slot holds, as its header says."""

    step: int
    """Steps done."""
    sequence: int
    """The how-manieth snapshot of this worker in this generation, from 1."""
    generation: int
    rank: int
    world_size: int
    table_bytes: int
    extra_start: int
    """First byte of the JSON of `extra`; the tensors end before it."""
    extra_bytes: int

    @property
    def end(self) -> int:
        """Where the content ends in the file."""
        return self.extra_start + self.extra_bytes


class Slot:
    """One mapped file. Made by an agent with `create`, opened with its path by the worker and by readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR)
        try:
            self.capacity = os.fstat(file).st_size
            # populated: the page faults of the first touch cost more than a copy
            self._map = mmap.mmap(file, self.capacity, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        self.bytes = memoryview(self._map)
        self._header = np.frombuffer(self._map, np.int64, 10)

    @classmethod
    def create(cls, path: Path, capacity: int) -> Slot:
        """A new file with all its pages.

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
        """It holds nothing from now on; before anything in it is changed."""
        self._header[_STEP] = -1
        self._header[0] = _MAGIC

    def commit(self, content: Content) -> None:
        """It holds `content` from now on, all of which is in place."""
        self._header[2:9] = (content.sequence, content.generation, content.rank, content.world_size,
                             content.table_bytes, content.extra_start, content.extra_bytes)
        self._header[_STEP] = content.step

    def content(self) -> Content | None:
        """What it holds; None: nothing, or something is being written."""
        magic, step, *values = (int(value) for value in self._header[:9])
        if magic != _MAGIC or step < 0:
            return None
        found = Content(step, *values)
        whole = 0 <= found.table_bytes <= found.extra_start - HEADER_BYTES and found.extra_bytes >= 0
        return found if whole and found.end <= self.capacity else None

    def hashes(self, end: int) -> np.ndarray:
        """uint64 [blocks]: of each block of the content that ends at `end`."""
        return hash_blocks(self.bytes[HEADER_BYTES:end])

    def unlink(self) -> None:
        """Take its name away; it goes when nobody maps it any more."""
        self.path.unlink(missing_ok=True)


def num_blocks(end: int) -> int:
    """Blocks of the content that ends at byte `end`."""
    return -(-(end - HEADER_BYTES) // BLOCK_BYTES)


def block_of(byte: int) -> int:
    """The block that a byte of the content is in."""
    return (byte - HEADER_BYTES) // BLOCK_BYTES


def block_range(first: int, last: int, end: int) -> tuple[int, int]:
    """First byte, and end, of blocks `first` to `last`, the content ending at `end`."""
    return HEADER_BYTES + first * BLOCK_BYTES, min(HEADER_BYTES + (last + 1) * BLOCK_BYTES, end)


def hash_blocks(data: memoryview) -> np.ndarray:
    """uint64 [blocks]: the xxh3 of each block of a slot's bytes, which begin with a block. It finds damage, not a
    forger: nobody else can write here."""
    return np.array([xxhash.xxh3_64_intdigest(data[start:start + BLOCK_BYTES])
                     for start in range(0, len(data), BLOCK_BYTES)], dtype=np.uint64)


class Folder:
    """The folder of one agent's slots; locked while the agent lives, so that others know what is left over."""

    def __init__(self, run: str, root: Path = SHARED_MEMORY) -> None:
        self.path = root / f"{PREFIX}{run}-{uuid.uuid4().hex[:12]}"
        new = root / f".{self.path.name}"  # nobody sees the folder without its lock
        new.mkdir(0o700)
        self._lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path)
        self._number = 0

    def new(self, capacity: int) -> Slot:
        """One more slot; CheckpointError when there is no room."""
        self._number += 1
        return Slot.create(self.path / f"slot-{self._number:06d}", capacity)

    def remove(self) -> None:
        """Delete it with all slots."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(root: Path = SHARED_MEMORY) -> list[str]:
    """Delete the folders of agents that are gone, of whatever run; their names."""
    gone = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # another user's, or another sweep is at it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its agent lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
        finally:
            os.close(lock)
    return gone
