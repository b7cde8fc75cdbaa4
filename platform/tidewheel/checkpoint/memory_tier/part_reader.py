"""Reads one rank's part from the agents that hold it, with every byte checked. This module does not import torch."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from tidewheel.checkpoint.memory_tier.inventory import ASK_SECONDS, Copy
from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, connect
from tidewheel.checkpoint.memory_tier.slots import Slot, block_of, block_range, hash_blocks
from tidewheel.checkpoint.memory_tier.table import Piece, parse, parse_holders
from tidewheel.checkpoint.tensor_entry import TensorEntry
from tidewheel.errors import CheckpointError

READ_SECONDS = 5.0
"""An agent that sends nothing for this long is given up."""
FALLBACK = "the newest intact checkpoint is used instead"
T = TypeVar("T")


class PartReader:
    """One rank's part, read from any copy that is alive and intact. Safe to use from several threads.

    Args:
        copies: at least one, in order of preference.
        token: the run's secret.
        own_agent: the agent of this node, whose slots are mapped instead of sent; None: none is.
    """

    def __init__(self, copies: Sequence[Copy], token: str, own_agent: Address | None) -> None:
        self._copies, self._token, self._mine = list(copies), token, own_agent
        self.near = copies[0].agent == own_agent
        self.pieces: list[Piece] = []
        self.rules: dict[str, TensorEntry] = {}
        """Of the tensors of all ranks, by name; empty: not known."""
        self.extra: dict[str, Any] = {}
        self.read_bytes: Counter[str] = Counter()
        """Bytes that were read, by the origin of the copy."""
        self._table = b""
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._mapped: dict[str, Slot] = {}
        self._buffers = threading.local()

    def describe(self) -> None:
        """Fill in `pieces`, `rules` and `extra`.

        Raises:
            CheckpointError: they are damaged or gone in all copies.
        """
        self._from_any(self._describe)

    def holders(self) -> list[int]:
        """Return for each rank the first that holds the same part, as the described part says; empty: not known."""
        return parse_holders(self._table)

    def read(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of the slot, checked; valid until this thread's next call.

        Raises:
            CheckpointError: they are damaged or gone in all copies.
        """
        if end <= start:
            return memoryview(b"")
        return self._from_any(lambda copy: self._read(copy, start, end))

    def close(self) -> None:
        """Close all connections."""
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
        self.extra = json.loads(extra)
        self.pieces, self.rules = parse(table, answer["extra_start"])
        self._table = bytes(table)

    def _read(self, copy: Copy, start: int, end: int) -> memoryview:
        near = copy.agent == self._mine
        first, last = block_of(start), block_of(end - 1)
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
        with self._lock:
            self.read_bytes[copy.origin] += stop - begin
        return data[start - begin:end - begin]

    @contextlib.contextmanager
    def _connected(self, agent: Address) -> Iterator[Connection]:
        """Yield a connection for one exchange, and keep it for the next one if the exchange succeeds."""
        with self._lock:
            idle = self._idle.setdefault(agent, [])
            connection = idle.pop() if idle else None
        connection = connection or connect(agent, self._token, seconds=ASK_SECONDS, idle_seconds=READ_SECONDS)
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
        """Return this thread's buffer: reused memory costs no page faults."""
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = self._buffers.buffer = memoryview(bytearray(length))
        return buffer[:length]

    def _from_any(self, read: Callable[[Copy], T]) -> T:
        problems = []
        for copy in list(self._copies):
            try:
                return read(copy)
            except (OSError, ValueError, LookupError, TypeError) as error:
                problems.append(f"{copy.origin} at {copy.agent.host}:{copy.agent.port}: {error}")
                with self._lock:  # try the others first from now on: this one may take seconds to fail again
                    self._copies.sort(key=lambda other: other == copy)
        first = self._copies[0]
        raise CheckpointError(f"the part of rank {first.rank} is lost ({'; '.join(problems)})"[:500],
                              where=f"memory tier, step {first.step}", fix=FALLBACK)
