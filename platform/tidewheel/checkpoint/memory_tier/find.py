"""What the agents hold, which steps of it are whole, and the bytes of it, checked. No torch in here: agents use it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, connect
from tidewheel.checkpoint.memory_tier.slots import Slot, block_of, block_range, hash_blocks
from tidewheel.checkpoint.memory_tier.table import Piece, parse
from tidewheel.errors import CheckpointError

ASK_SECONDS = 2.0
"""Whoever does not say within this what it holds is taken for dead: a dead process refuses at once, a frozen one lets
everyone wait."""
READ_SECONDS = 5.0
"""An agent that sends nothing for so long is passed over."""
MEND = "the newest intact checkpoint is used instead"
T = TypeVar("T")


@dataclass(frozen=True)
class Copy:
    """One rank's part at one agent."""

    agent: Address
    part: int
    """Its number there."""
    origin: str
    """"own": of a worker of that node; "copy": held for its buddy."""
    path: str
    step: int
    generation: int
    rank: int
    world_size: int
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """What the agents that answered hold."""

    copies: tuple[Copy, ...]
    alive: tuple[Address, ...]
    workers: int
    """That are connected to them."""
    generation: int
    """The newest that any of them has heard of; -1: none."""
    run_token: str = field(repr=False)


@dataclass(frozen=True)
class Recoverable:
    """A step of which every rank's part is in memory somewhere."""

    step: int
    generation: int
    world_size: int
    copies: tuple[tuple[Copy, ...], ...]
    """By rank, the worker's own node first."""
    run_token: str = field(repr=False)


def inventory(agents: Iterable[Address], run_token: str, *, generation: int | None = None,
              seconds: float = ASK_SECONDS) -> Inventory:
    """What is held where. Agents that do not answer within `seconds` are passed over; all are asked at once.

    Args:
        generation: of the workers that ask: from now on the agents refuse those of earlier epochs.
    """
    asked = sorted(set(agents))
    question = {"op": "inventory", **({} if generation is None else {"generation": generation})}
    with ThreadPoolExecutor(max(1, min(64, len(asked)))) as pool:
        answers = list(pool.map(lambda each: ask(each, run_token, question, seconds=seconds), asked))
    alive = {agent: answer for agent, answer in zip(asked, answers) if answer is not None}
    copies = tuple(Copy(agent=agent, **part) for agent, answer in alive.items() for part in answer["parts"])
    return Inventory(copies, tuple(alive), sum(answer["workers"] for answer in alive.values()),
                     max((answer["generation"] for answer in alive.values()), default=-1), run_token)


def ask(agent: Address, token: str, message: dict[str, Any], *, seconds: float = ASK_SECONDS) -> dict[str, Any] | None:
    """What an agent answers to one message; None: it is dead, frozen, or refuses."""
    try:
        connection = connect(agent, token, seconds=seconds, patience=seconds)
        try:
            return connection.ask(message)
        finally:
            connection.close()
    except OSError:
        return None


def candidates(found: Inventory) -> list[Recoverable]:
    """All steps that are whole, the newest first.

    A later generation goes before an earlier one whatever their steps: it is what the run has done last.
    """
    held: dict[tuple[int, int], dict[int, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in found.copies:
        held[copy.generation, copy.step][copy.rank].append(copy)
    whole = []
    for (generation, step), by_rank in sorted(held.items(), reverse=True):
        world_size = next(copy.world_size for copies in by_rank.values() for copy in copies)
        if set(by_rank) == set(range(world_size)):
            copies = tuple(tuple(sorted(by_rank[rank], key=lambda copy: copy.origin != "own"))
                           for rank in range(world_size))
            whole.append(Recoverable(step, generation, world_size, copies, found.run_token))
    return whole


def newest_complete(found: Inventory) -> Recoverable | None:
    """The newest step of which every rank's part exists, its own or its buddy's copy; None: there is none."""
    return next(iter(candidates(found)), None)


class PartReader:
    """One rank's part, from whichever of its copies is alive and intact; safe to use from several threads."""

    def __init__(self, copies: Sequence[Copy], token: str, mine: Address | None) -> None:
        self._copies, self._token, self._mine = list(copies), token, mine
        self.near = copies[0].agent == mine
        self.pieces: list[Piece] = []
        self.extra: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._mapped: dict[str, Slot] = {}
        self._buffers = threading.local()

    def describe(self) -> None:
        """Learn what is in it; CheckpointError when no copy tells."""
        self._from_any(self._describe)

    def read(self, start: int, end: int) -> memoryview:
        """Bytes [start, end) of the part, checked; valid until this thread's next call.

        Raises:
            CheckpointError: they are damaged or gone in all copies.
        """
        if end <= start:
            return memoryview(b"")
        return self._from_any(lambda copy: self._read(copy, start, end))

    def close(self) -> None:
        """Let go of connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _describe(self, copy: Copy) -> None:
        with self._connected(copy.agent) as connection:
            answer = connection.ask({"op": "describe", "part": copy.part})
            table = connection.receive_bytes(answer["table_bytes"])
            extra = connection.receive_bytes(answer["extra_bytes"])
        if (xxhash.xxh3_64_intdigest(table), xxhash.xxh3_64_intdigest(extra)) != (
                answer["table_hash"], answer["extra_hash"]):
            raise ValueError("its table is damaged")
        self.extra, self.pieces = json.loads(extra), parse(table, answer["extra_start"])

    def _read(self, copy: Copy, start: int, end: int) -> memoryview:
        near, first, last = copy.agent == self._mine, block_of(start), block_of(end - 1)
        begin, stop = block_range(first, last, copy.bytes)
        with self._connected(copy.agent) as connection:
            hashes = connection.ask({"op": "read", "part": copy.part, "first": first, "last": last,
                                     "bytes": not near})["hashes"]
            if near:
                data = self._map(copy.path)[begin:stop]
            else:
                data = self._buffer(stop - begin)
                connection.receive_into(data)
        if not np.array_equal(hash_blocks(data), np.array(hashes, dtype=np.uint64)):
            raise ValueError("its content is damaged")
        return data[start - begin:end - begin]

    @contextlib.contextmanager
    def _connected(self, agent: Address) -> Iterator[Connection]:
        """A connection for one exchange; kept for the next one when that went well."""
        with self._lock:
            idle = self._idle.setdefault(agent, [])
            connection = idle.pop() if idle else None
        connection = connection or connect(agent, self._token, seconds=ASK_SECONDS, patience=READ_SECONDS)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            idle.append(connection)

    def _map(self, path: str) -> memoryview:
        with self._lock:
            if path not in self._mapped:
                self._mapped[path] = Slot(Path(path))
            return self._mapped[path].bytes

    def _buffer(self, length: int) -> memoryview:
        """This thread's: memory that was used before costs no page faults."""
        held: memoryview | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < length:
            held = self._buffers.held = memoryview(bytearray(length))
        return held[:length]

    def _from_any(self, read: Callable[[Copy], T]) -> T:
        problems = []
        for copy in list(self._copies):
            try:
                return read(copy)
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{copy.origin} at {copy.agent.host}:{copy.agent.port}: {error}")
                with self._lock:  # from now on the others first: this one may take seconds to fail again
                    self._copies.sort(key=lambda other: other == copy)
        first = self._copies[0]
        raise CheckpointError(f"the part of rank {first.rank} is lost ({'; '.join(problems)})"[:500],
                              where=f"memory tier, step {first.step}", mend=MEND)
