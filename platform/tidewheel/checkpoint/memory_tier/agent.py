"""The node's agent: holds the states of its node's workers, and copies of another node's, while they may be needed.

A server of plain threads and sockets that knows neither Ray nor torch. It runs outside the training processes, so what
it holds survives them; its copies at the buddy survive it. Everything it holds is in memory: an agent that dies takes
its index with it, and the next one on the machine deletes its files (`slots.sweep`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.buddies import Buddies
from tidewheel.checkpoint.memory_tier.orphans import Orphans
from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, FileRange, admit
from tidewheel.checkpoint.memory_tier.slots import (
    HEADER_BYTES,
    SHARED_MEMORY,
    Content,
    Folder,
    Slot,
    block_range,
    num_blocks,
    sweep,
)
from tidewheel.checkpoint.memory_tier.table import tensors_start
from tidewheel.commit_log import epoch_of
from tidewheel.errors import CheckpointError
from tidewheel.strangers import Strangers

SLOTS = 3
"""Of each worker. A push may lag one snapshot behind, so the copy of a lost worker is of snapshot i or i - 1 when the
others are between i and i + 1: they must have kept i - 1 until i + 1 is whole."""
COPIES = 2
"""Of each worker at its buddy: one is whole while the next arrives."""
SETTLED = 3
"""The third snapshot of a generation says that the first is whole everywhere: older generations can go."""
EXTRA_BYTES = 1 << 20
"""Room for the JSON of `extra`, which is not of the same length in each snapshot."""
LINGER_SECONDS = 900.0
"""Without workers for so long, an agent lets go of everything, whether storage took it or not."""
UPLOAD_SECONDS = 30.0
"""So long all workers of the run must have been gone before all but the newest whole step is dropped and that is
uploaded: longer than any recovery. A driver that ends has this done at once."""
SWEEP_SECONDS = 30.0
ACCEPT_SECONDS = 0.2
"""After a connection that could not be taken, the next is tried so much later."""
NICENESS = 4
"""Added to the agent's process: hashing and sending make way for the training where both want the same core."""


@dataclass(frozen=True)
class Part:
    """One worker's part of the state at one step, whole and hashed."""

    number: int
    """By which readers ask for it."""
    content: Content
    origin: Literal["own", "copy"]
    slot: Slot = field(repr=False)
    hashes: np.ndarray = field(repr=False)
    """uint64 [blocks], see `slots.hash_blocks`."""
    table_hash: int
    extra_hash: int

    @property
    def intact(self) -> bool:
        """The slot still holds it. (What the content is worth, the hashes say.)"""
        return self.slot.content() == self.content


class Agent:
    """Listens on `host` from its making on, until `stop`.

    Args:
        host: the node's own address, or 127.0.0.1.
        token: the run's; who does not know it is not heard.
        run: a short name for the folder in shared memory.
        root: the folder of shared memory.
        linger_seconds: without any worker for so long, it stops: nobody is coming back.
        upload_seconds: without any worker on any node for so long, all but the newest whole step is dropped, and that
            is uploaded by one of the agents, unless storage has it. Then all of them stop.
        on_stop: called once it has stopped.
    """

    def __init__(self, host: str, token: str, run: str, *, root: Path = SHARED_MEMORY,
                 linger_seconds: float = LINGER_SECONDS, upload_seconds: float = UPLOAD_SECONDS,
                 on_stop: Callable[[], None] | None = None) -> None:
        sweep(root)
        self._root = root
        self.token, self._on_stop, self._linger = token, on_stop, linger_seconds
        self._folder = Folder(run, root)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._parts: dict[Path, Part] = {}
        self._copies: dict[tuple[int, int], list[Slot]] = {}  # of (generation, rank)
        self._free: list[Slot] = []
        self._workers: set[_Worker] = set()
        self._connections: set[Connection] = set()
        self._readers: set[Connection] = set()  # that load what is here, or upload it
        self._stopped = threading.Event()
        self._last = time.monotonic()
        self._orphans = Orphans(upload_seconds)
        self._strangers = Strangers()
        self._generation = -1  # the newest that was heard of
        self._listener = socket.create_server((host, 0), backlog=256)
        self.address = Address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="memory agent", daemon=True).start()
        threading.Thread(target=self._wait_for_nobody, name="memory agent linger", daemon=True).start()

    def stop(self) -> None:
        """Close all connections and delete what is held."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            connections = list(self._connections)
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._folder.remove()
        for connection in connections:  # last: to who asked for it, this is the sign that all is deleted
            connection.close()
        if self._on_stop is not None:
            self._on_stop()

    @property
    def stopped(self) -> threading.Event:
        """Set once it has begun to stop."""
        return self._stopped

    # -- connections ---------------------------------------------------------------------------
    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it was closed; or this process has too many files open just now
                self._stopped.wait(ACCEPT_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(sock,), name="memory agent connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with self._strangers.one(functools.partial(_hang_up, sock)):
                connection = admit(sock, self.token)
        except OSError:
            return  # a stranger, or gone already
        with self._lock:
            self._connections.add(connection)
        worker = _Worker(self)
        try:
            while not self._stopped.is_set():
                self._answer(connection, connection.receive(), worker)
        except OSError:
            pass  # the other side is gone: the usual end of a connection
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._readers.discard(connection)
            if not self._stopped.is_set():
                worker.gone()

    def _answer(self, connection: Connection, message: dict[str, Any], worker: _Worker) -> None:
        """One request. A mistake in it is answered; OSError ends the connection."""
        try:
            kind = message["op"]
            if kind == "inventory":
                if "generation" in message:
                    self.hear_of(int(message["generation"]))
                connection.send({"parts": self._inventory(), "workers": len(self._workers),
                                 "generation": self._generation, "uploads": bool(self._orphans.checkpoints)})
            elif kind == "describe":
                with self._lock:
                    self._readers.add(connection)
                self._describe(connection, self._part(message["part"]))
            elif kind == "read":
                self._read(connection, self._part(message["part"]), message)
            elif kind == "store":
                self._store(connection, message)
            elif kind == "open":
                worker.open(message)
                connection.send({})
            elif kind == "slot":
                connection.send({"path": str(worker.slot(int(message["slot"])).path)})
            elif kind == "put":
                connection.send(worker.put(int(message["slot"])))
            elif kind == "forget":
                self.forget(rank=int(message["rank"]))
                worker.forget(message)
                connection.send({})
            elif kind == "abandon":
                self._orphans.abandoned = True
                connection.send({})
            elif kind == "keep":
                if self._is_left(int(message["generation"])):
                    self._keep_only(int(message["of"]), int(message["step"]))
                connection.send({})
            elif kind == "stop" or kind == "release":
                connection.send({})
                if kind == "stop" or self._is_left(int(message["generation"])):
                    self.stop()
            else:
                raise ValueError(f"{kind!r} is not known")
        except CheckpointError as error:
            connection.send({"problem": str(error)})
        except (LookupError, TypeError, ValueError) as error:
            connection.send({"problem": f"{type(error).__name__}: {error}"})

    def _wait_for_nobody(self) -> None:
        swept = time.monotonic()
        while not self._stopped.wait(min(1.0, self._linger)):
            if time.monotonic() - swept > SWEEP_SECONDS:
                sweep(self._root)
                swept = time.monotonic()
            with self._lock:
                busy, working = bool(self._connections), bool(self._workers or self._readers)
            self._orphans.look(self, working)
            if working:
                self._last = time.monotonic()
            elif time.monotonic() - self._last > self._linger and not busy:  # busy: another one reads what it uploads
                self.stop()

    # -- who may write -------------------------------------------------------------------------
    def hear_of(self, generation: int) -> None:
        """A generation says something: from now on earlier epochs are refused, and an upload of what was left stops.

        Raises:
            CheckpointError: it is of an earlier epoch than one that was heard of.
        """
        with self._lock:
            newest = self._generation
            if epoch_of(generation) >= epoch_of(newest):
                self._generation = max(newest, generation)
        if epoch_of(generation) < epoch_of(newest):
            raise CheckpointError(
                f"generation {generation} is of epoch {epoch_of(generation)}, and epoch {epoch_of(newest)} of the run "
                "has begun", where="memory tier", mend="nothing: another driver has taken the run over")
        self._last = time.monotonic()
        self._orphans.cancel(f"generation {generation} is at work")

    def _is_left(self, generation: int) -> bool:
        """No worker is here, and none of a later generation was heard of."""
        with self._lock:
            return not self._workers and self._generation <= generation

    def _keep_only(self, generation: int, step: int) -> None:
        """Drop all but this step, and the room that was kept for more."""
        with self._lock:
            kept = {path: part for path, part in self._parts.items()
                    if (part.content.generation, part.content.step) == (generation, step)}
            slots = [part.slot for part in self._parts.values()] + self._free
            slots += [slot for copies in self._copies.values() for slot in copies]
            self._parts, self._free, self._copies = kept, [], {}
        for slot in slots:
            if slot.path not in kept:
                slot.unlink()

    # -- what is held --------------------------------------------------------------------------
    def hold(self, slot: Slot, content: Content, origin: Literal["own", "copy"], hashes: np.ndarray) -> Part:
        """From now on serve this content of this slot; CheckpointError when its epoch is over."""
        self.hear_of(content.generation)
        extra = slot.bytes[content.extra_start:content.end]
        table = slot.bytes[HEADER_BYTES:HEADER_BYTES + content.table_bytes]
        part = Part(next(self._numbers), content, origin, slot, hashes, xxhash.xxh3_64_intdigest(table),
                    xxhash.xxh3_64_intdigest(extra))
        with self._lock:
            self._parts[slot.path] = part
        if content.sequence >= SETTLED:
            self.forget(before=content.generation)
        return part

    def forget(self, *, before: int | None = None, rank: int | None = None) -> None:
        """Drop the parts of generations before `before`, or all of `rank` (default: of all ranks)."""
        def goes(generation: int, of: int) -> bool:
            return (before is None or generation < before) and (rank is None or of == rank)

        with self._lock:
            mapped = {slot.path for worker in self._workers for slot in worker.slots}
            gone = [part.slot for part in self._parts.values() if goes(part.content.generation, part.content.rank)]
            for slot in gone:
                del self._parts[slot.path]
            for key in [key for key in self._copies if goes(*key)]:
                gone += [slot for slot in self._copies.pop(key) if slot not in gone]
            # a worker that still maps a slot may write to it: nobody else gets it
            self._free += [slot for slot in gone if slot.path not in mapped]
            self._tidy()

    def _tidy(self) -> None:
        """Keep as many free slots as one worker needs: allocating anew is slow, keeping all is dear."""
        while len(self._free) > SLOTS:
            self._free.pop(0).unlink()

    def release(self, worker: _Worker) -> None:
        """The worker is gone: what its slots hold stays, empty ones are free."""
        with self._lock:
            self._workers.discard(worker)
            self._free += [slot for slot in worker.slots if slot.path not in self._parts]
            self._tidy()

    def learn(self, message: dict[str, Any]) -> None:
        """Where the run's checkpoints are, and its other agents, as a worker says."""
        self._orphans.abandoned = False
        self._orphans.checkpoints = str(message.get("checkpoints", ""))
        self._orphans.agents = [Address(str(host), int(port)) for host, port in message.get("agents", ())]

    def enrol(self, worker: _Worker) -> None:
        """A worker has opened slots."""
        with self._lock:
            self._workers.add(worker)

    def allocate(self, capacity: int) -> Slot:
        """A slot of at least `capacity` bytes; CheckpointError when there is no room."""
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
        return self._folder.new(capacity)  # gigabytes take a second: not under the lock

    def _inventory(self) -> list[dict[str, Any]]:
        with self._lock:
            parts = list(self._parts.values())
        return [{"part": part.number, "origin": part.origin, "path": str(part.slot.path), "step": part.content.step,
                 "generation": part.content.generation, "rank": part.content.rank,
                 "world_size": part.content.world_size, "bytes": part.content.end}
                for part in parts if part.intact]

    def _part(self, number: int) -> Part:
        with self._lock:
            for part in self._parts.values():
                if part.number == number:
                    return part
        raise LookupError(f"part {number} is no longer here")

    def _describe(self, connection: Connection, part: Part) -> None:
        """Table and `extra` of a part."""
        content, data = part.content, part.slot.bytes
        connection.send({"table_bytes": content.table_bytes, "table_hash": part.table_hash,
                         "extra_start": content.extra_start, "extra_bytes": content.extra_bytes,
                         "extra_hash": part.extra_hash},
                        data[HEADER_BYTES:HEADER_BYTES + content.table_bytes], data[content.extra_start:content.end])

    def _read(self, connection: Connection, part: Part, wanted: dict[str, Any]) -> None:
        """Hashes of the blocks "first" to "last", and, unless the reader maps the slot itself, their bytes."""
        first, last = int(wanted["first"]), int(wanted["last"])
        if not 0 <= first <= last < num_blocks(part.content.end):
            raise ValueError("blocks outside the part")
        start, stop = block_range(first, last, part.content.end)
        connection.send({"hashes": part.hashes[first:last + 1].tolist()},
                        *([part.slot.bytes[start:stop]] if wanted["bytes"] else ()))

    # -- copies of others ----------------------------------------------------------------------
    def _store(self, connection: Connection, message: dict[str, Any]) -> None:
        """Take a copy of another node's part. The one before stays whole until this one is."""
        content = Content(**message["content"])
        if not tensors_start(content.table_bytes) <= content.extra_start <= content.end:
            raise ConnectionError("a part that makes no sense")  # its bytes cannot be told from what follows
        try:
            self.hear_of(content.generation)
            slot = self._slot_for_copy(content)
        except CheckpointError as error:
            self._skip(connection, content)
            raise error
        connection.receive_into(slot.bytes[HEADER_BYTES:content.end])
        hashes = np.frombuffer(connection.receive_bytes(8 * num_blocks(content.end)), np.uint64)
        slot.commit(content)
        self.hold(slot, content, "copy", hashes)
        connection.send({})

    def _slot_for_copy(self, content: Content) -> Slot:
        key = (content.generation, content.rank)
        with self._lock:
            slots = [slot for slot in self._copies.get(key, ()) if slot.capacity >= content.end]
        if len(slots) < COPIES:  # and should `extra` have grown, the small ones go with their generation
            slot = self.allocate(content.end + EXTRA_BYTES)
            with self._lock:
                self._copies[key] = [*self._copies.get(key, ()), slot]
            return slot
        with self._lock:
            held = {slot: self._parts.get(slot.path) for slot in slots}
            # one may be half full: its sender went away
            slot = min(slots, key=lambda slot: -1 if (part := held[slot]) is None else part.content.step)
            self._parts.pop(slot.path, None)
        slot.clear()
        return slot

    def _skip(self, connection: Connection, content: Content) -> None:
        left = content.end - HEADER_BYTES + 8 * num_blocks(content.end)
        while left:
            left -= len(connection.receive_bytes(min(left, 1 << 20)))


def _hang_up(sock: socket.socket) -> None:
    """End a connection that another thread waits on."""
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RDWR)


class _Worker:
    """A worker that this agent serves, by its connection; nothing for a connection that only asks."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._buddies = Buddies((), agent.token)
        self._seen = 0
        self.slots: list[Slot] = []
        self._making: threading.Thread | None = None
        self._made = threading.Condition()
        self._problem: Exception | None = None

    def open(self, message: dict[str, Any]) -> None:
        """Begin to make the worker's slots; those it had are free, what they hold is served on."""
        self._agent.hear_of(int(message["generation"]))
        self._await_slots()
        self._agent.release(self)
        self._agent.learn(message)
        self._buddies.close()
        self._buddies = Buddies([Address(str(host), int(port)) for host, port in message["buddies"]],
                                self._agent.token)
        self.slots, self._problem = [], None
        self._agent.enrol(self)
        self._making = threading.Thread(target=self._make, args=(int(message["capacity"]),), daemon=True)
        self._making.start()

    def _make(self, capacity: int) -> None:
        """All slots, one after the other: gigabytes that nobody has touched take seconds, training need not wait."""
        for _ in range(SLOTS):
            try:
                slot: Slot | None = self._agent.allocate(capacity)
            except (CheckpointError, OSError) as error:
                self._problem, slot = error, None
            with self._made:
                if slot is not None:
                    self.slots.append(slot)
                self._made.notify_all()
            if slot is None:
                return

    def slot(self, number: int) -> Slot:
        """One of them, once it is there; CheckpointError when there is no room."""
        if not 0 <= number < SLOTS:
            raise LookupError(f"there is no slot {number}")
        with self._made:
            self._made.wait_for(lambda: len(self.slots) > number or self._problem is not None)
            if len(self.slots) <= number:
                assert self._problem is not None
                raise self._problem
            return self.slots[number]

    def _await_slots(self) -> None:
        if self._making is not None:
            self._making.join()

    def put(self, number: int) -> dict[str, Any]:
        """The worker has filled a slot: hash it, serve it, copy it to the buddy."""
        began = time.monotonic()
        if not 0 <= number < len(self.slots):
            raise LookupError(f"there is no slot {number}")
        slot = self.slots[number]
        content = slot.content()
        if content is None:
            raise ValueError(f"slot {number} holds nothing")
        hashes = slot.hashes(content.end)
        part = self._agent.hold(slot, content, "own", hashes)
        self._seen = content.sequence
        hashed = time.monotonic()
        copied_to, refused = self._buddies.send(
            {"op": "store", "content": asdict(content)},
            FileRange(part.slot.path, HEADER_BYTES, content.end), part.hashes.tobytes())
        return {"step": content.step, "bytes": content.end, "hash_seconds": hashed - began,
                "push_seconds": time.monotonic() - hashed, "copied_to": copied_to, "refused": refused}

    def forget(self, message: dict[str, Any]) -> None:
        """What this worker has put is no longer wanted, nor are its copies."""
        self._buddies.tell_all(message)

    def gone(self) -> None:
        """The worker's connection has closed: take in what it had just filled, and copy that too."""
        self._await_slots()
        found = [(content.sequence, number) for number, slot in enumerate(self.slots)
                 if (content := slot.content()) is not None and content.sequence > self._seen]
        with contextlib.suppress(CheckpointError):  # its epoch is over: nobody wants it
            for _, number in sorted(found):
                self.put(number)
        self._buddies.close()
        self._agent.release(self)
