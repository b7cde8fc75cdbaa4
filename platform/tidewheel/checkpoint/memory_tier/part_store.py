"""The parts that one agent holds, and the slots of shared memory that they are in. Safe to use from several threads."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.slots import (
    EXTRA_BYTES,
    HEADER_BYTES,
    REPLICA_SLOTS,
    SLOTS_PER_WORKER,
    Content,
    Folder,
    Slot,
)

Origin = Literal["own", "copy", "disk"]
"""Whether a worker of this node wrote a part, it is a replica from another node, or it is a file of the local disk."""
SETTLED = 3
"""Once a generation's third snapshot is held, its first is complete on all nodes: older generations are dropped."""


@dataclass(frozen=True)
class Part:
    """One worker's part of the state at one step, complete and hashed."""

    number: int
    """Readers ask for the part by this number."""
    content: Content
    origin: Origin
    slot: Slot = field(repr=False)
    hashes: np.ndarray = field(repr=False)
    """uint64 [blocks], see `slots.hash_blocks`."""
    table_hash: int
    extra_hash: int

    @property
    def intact(self) -> bool:
        """Whether the slot's header still describes this part. The hashes say whether the bytes are intact."""
        return self.slot.content() == self.content


class SlotOwner(Protocol):
    """A worker that maps slots."""

    slots: list[Slot]


class PartStore:
    """Parts by slot, the slots of replicas, and free slots.

    Args:
        run: a short name for the folder in shared memory.
        root: the folder of shared memory.
    """

    def __init__(self, run: str, root: Path) -> None:
        self._folder = Folder(run, root)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._parts: dict[Path, Part] = {}
        self._on_disk: dict[Path, Part] = {}
        self._replica_slots: dict[tuple[int, int], list[Slot]] = {}  # by (generation, rank)
        self._free: list[Slot] = []
        self._workers: set[SlotOwner] = set()

    @property
    def folder(self) -> Path:
        """The folder of the slots."""
        return self._folder.path

    @property
    def num_workers(self) -> int:
        """Workers that have slots here."""
        with self._lock:
            return len(self._workers)

    def remove(self) -> None:
        """Delete all slots."""
        self._folder.remove()

    # -- parts ---------------------------------------------------------------------------------
    def parts(self) -> list[Part]:
        """Return all parts, in no particular order."""
        with self._lock:
            return [*self._parts.values(), *self._on_disk.values()]

    def part(self, number: int) -> Part:
        """Return the part with this number.

        Raises:
            LookupError: it has been dropped.
        """
        for part in self.parts():
            if part.number == number:
                return part
        raise LookupError(f"part {number} is no longer here")

    def add(self, slot: Slot, content: Content, origin: Origin, hashes: np.ndarray) -> Part:
        """Add the content of `slot`, and drop older generations once this one is complete everywhere.

        Args:
            slot: the slot that holds it; a part that was in the slot before is replaced.
            content: what the slot's header says.
            origin: who wrote it.
            hashes: uint64 [blocks], see `slots.hash_blocks`.
        """
        extra = slot.bytes[content.extra_start:content.end]
        table = slot.bytes[HEADER_BYTES:HEADER_BYTES + content.table_bytes]
        part = Part(next(self._numbers), content, origin, slot, hashes, xxhash.xxh3_64_intdigest(table),
                    xxhash.xxh3_64_intdigest(extra))
        with self._lock:
            self._parts[slot.path] = part
        if content.sequence >= SETTLED:
            self.forget(before=content.generation)
        return part

    def add_from_disk(self, part: Part) -> None:
        """Serve a file of the local disk.

        Args:
            part: as `disk_file.read` returns it; it gets a number.
        """
        with self._lock:
            self._on_disk[part.slot.path] = replace(part, number=next(self._numbers))

    def drop_from_disk(self, path: Path) -> None:
        """Serve a file of the local disk no longer."""
        with self._lock:
            self._on_disk.pop(path, None)

    def forget(self, *, before: int | None = None, rank: int | None = None) -> None:
        """Drop the parts of generations before `before` (default: of all), of `rank` (default: of all ranks)."""
        def matches(generation: int, of_rank: int) -> bool:
            return (before is None or generation < before) and (rank is None or of_rank == rank)

        with self._lock:
            mapped = {slot.path for worker in self._workers for slot in worker.slots}
            slots = [part.slot for part in self._parts.values() if matches(part.content.generation, part.content.rank)]
            for slot in slots:
                del self._parts[slot.path]
            for key in [key for key in self._replica_slots if matches(*key)]:
                slots += [slot for slot in self._replica_slots.pop(key) if slot not in slots]
            # a worker may still write to a slot that it maps, so nobody else gets that slot
            self._free += [slot for slot in slots if slot.path not in mapped]
            self._trim_free()

    def keep_only(self, generation: int, step: int) -> None:
        """Drop all parts but those of this generation and step, and all free slots."""
        with self._lock:
            kept = {path: part for path, part in self._parts.items()
                    if (part.content.generation, part.content.step) == (generation, step)}
            slots = [part.slot for part in self._parts.values()] + self._free
            slots += [slot for replicas in self._replica_slots.values() for slot in replicas]
            self._parts, self._free, self._replica_slots = kept, [], {}
            self._on_disk = {path: part for path, part in self._on_disk.items()
                             if (part.content.generation, part.content.step) == (generation, step)}
        for slot in slots:
            if slot.path not in kept:
                slot.unlink()

    # -- slots ---------------------------------------------------------------------------------
    def enrol(self, worker: SlotOwner) -> None:
        """Add a worker that opens slots."""
        with self._lock:
            self._workers.add(worker)

    def release(self, worker: SlotOwner) -> None:
        """Remove a worker. Its parts stay; its empty slots become free."""
        with self._lock:
            self._workers.discard(worker)
            self._free += [slot for slot in worker.slots if slot.path not in self._parts]
            self._trim_free()

    def allocate(self, capacity: int) -> Slot:
        """Return a slot of at least `capacity` bytes, a free one if it fits.

        Raises:
            CheckpointError: there is not enough shared memory.
        """
        with self._lock:
            fitting = [slot for slot in self._free if capacity <= slot.capacity <= 2 * capacity]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.capacity)
                self._free.remove(slot)
                slot.clear()
                return slot
            for slot in self._free:
                slot.unlink()
            self._free.clear()
        return self._folder.new(capacity)  # not under the lock: allocating gigabytes takes a second

    def replica_slot(self, content: Content) -> Slot:
        """Return an empty slot for a replica; the previous replica stays until the new one is complete.

        Raises:
            CheckpointError: there is not enough shared memory.
        """
        key = (content.generation, content.rank)
        with self._lock:
            slots = [slot for slot in self._replica_slots.get(key, ()) if slot.capacity >= content.end]
        if len(slots) < REPLICA_SLOTS:  # slots that `extra` has outgrown are dropped with their generation
            slot = self.allocate(content.end + EXTRA_BYTES)
            with self._lock:
                self._replica_slots[key] = [*self._replica_slots.get(key, ()), slot]
            return slot
        with self._lock:
            slot = min(slots, key=self._step_in)
            self._parts.pop(slot.path, None)
        slot.clear()
        return slot

    def _step_in(self, slot: Slot) -> int:
        """Return the step of the part in `slot`; -1 when its sender hung up in the middle."""
        part = self._parts.get(slot.path)
        return -1 if part is None else part.content.step

    def _trim_free(self) -> None:
        """Keep as many free slots as one worker needs: allocating is slow, but keeping them all wastes memory."""
        while len(self._free) > SLOTS_PER_WORKER:
            self._free.pop(0).unlink()
