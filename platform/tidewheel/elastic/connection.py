"""What both ends of the connection between coordinator and workers share: time limits, lines and what was delivered."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidewheel.unauthenticated import HELLO_BYTES, HELLO_SECONDS

M = TypeVar("M")

MOST_BYTES = 1 << 20
"""Longest line of a worker."""
MOST_BYTES_TO_WORKER = 1 << 26
"""Longest line of the coordinator, who names all members of a generation."""
SILENT_SECONDS = 10.0
"""The kernel closes a connection whose other machine acknowledges nothing for this long."""
RECONNECT_SECONDS = 30.0
"""Time for a worker to reconnect after its connection broke. After it the worker ends, and the run continues without
it."""
RESET_SECONDS = 1.0
"""The coordinator waits this long for a worker after a reset. A process that dies closes its connections instead."""
RECEIVE_BYTES = 1 << 16
ACKNOWLEDGED = 64
"""Messages of a worker between two acknowledgements by the coordinator."""
ANSWER_SECONDS = 1.0
ANSWERS_A_SECOND = 2048
"""Answers to all workers together, at most."""


def answer_seconds(workers: int) -> float:
    """Return the time after which the coordinator answers the next message of a worker, so that it knows it is heard.

    Args:
        workers: number of workers with connections of their own.
    """
    return max(ANSWER_SECONDS, workers / ANSWERS_A_SECOND)


@dataclass(frozen=True)
class Endpoint:
    """Where and how workers connect."""

    address: tuple[str, int]
    """Host and port of the coordinator."""
    token: str = field(repr=False)
    """The run's token."""
    runs: bool = False
    """A generation has formed: a worker that starts now may get a rank at once."""
    run: str = ""
    """URI of the run."""
    epoch: int = -1
    """Epoch of the coordinator's driver; -1: it cannot be taken over."""
    workers: int = 1
    """Largest number of ranks."""


@dataclass
class DeliveryLog(Generic[M]):
    """Messages of one side that the other may not have received, and the number of the last message received."""

    sent: int = 0
    received: int = 0
    pending: deque[tuple[int, M]] = field(default_factory=deque)
    """Sequence numbers and messages, the oldest first."""

    def add(self, message: M) -> int:
        """Keep `message` until it is acknowledged; return its sequence number."""
        self.sent += 1
        self.pending.append((self.sent, message))
        return self.sent

    def acknowledge(self, received: int) -> None:
        """Forget all messages up to sequence number `received`."""
        while self.pending and self.pending[0][0] <= received:
            self.pending.popleft()

    def is_new(self, number: int | None) -> bool:
        """Return whether a message with this sequence number arrives for the first time; None is always new."""
        if number is None:
            return True
        new = number > self.received
        self.received = max(self.received, number)
        return new


async def next_line(reader: asyncio.StreamReader, most: int, *, skip: bool = False) -> bytes:
    """Return the next line, b"" at the end of the connection.

    Args:
        reader: the connection.
        most: longest line in bytes.
        skip: read a longer line to its end before raising.

    Raises:
        ValueError: the line is longer than `most`.
    """
    parts: list[bytes] = []
    length = 0
    while not parts or not parts[-1].endswith(b"\n"):
        try:
            part = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""  # the connection broke inside a line
        except asyncio.LimitOverrunError as error:  # longer than the reader's buffer
            part = await reader.readexactly(error.consumed)
        length += len(part)
        if length > most:
            parts.clear()
            if not skip:
                break
        parts.append(part)
    if length > most:
        raise ValueError(f"a line of {length} bytes, more than {most}")
    return b"".join(parts)


async def first_line(reader: asyncio.StreamReader) -> bytes:
    """Return the first line of a connection.

    Raises:
        TimeoutError: it takes longer than `HELLO_SECONDS`.
    """
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await next_line(reader, HELLO_BYTES)
    except TimeoutError:  # this process may have stood still: then the line is there, or is being read
        async with asyncio.timeout(HELLO_SECONDS / 10):
            return await next_line(reader, HELLO_BYTES)


class SilentError(Exception):
    """Nothing arrives on a connection."""


def lines_of(connection: socket.socket, seconds: float | None) -> Iterator[bytes]:
    """Yield the lines that arrive on a blocking connection until it ends.

    Args:
        connection: the connection.
        seconds: longest silence; None: any.

    Raises:
        SilentError: nothing arrives for so long.
        OSError: the connection broke, or a line is longer than `MOST_BYTES_TO_WORKER`.
    """
    arrives = select.poll()
    arrives.register(connection, select.POLLIN)
    rest = bytearray()
    while True:
        if not arrives.poll(None if seconds is None else 1000 * seconds):
            raise SilentError
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            return
        first, end, others = data.partition(b"\n")
        rest += first
        if end:
            *lines, last = others.split(b"\n")
            yield bytes(rest)
            yield from lines
            rest = bytearray(last)
        if len(rest) > MOST_BYTES_TO_WORKER:
            raise ConnectionError(f"a line of more than {MOST_BYTES_TO_WORKER} bytes")


def read_line(connection: socket.socket) -> bytes:
    """Return one line, and read nothing behind it.

    Raises:
        OSError: the connection ends inside the line, or the line is longer than `MOST_BYTES`.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection was closed")
        line += byte
        if len(line) > MOST_BYTES:
            raise ConnectionError(f"a line of more than {MOST_BYTES} bytes")
    return bytes(line)


def close(connection: socket.socket | None) -> None:
    """Close a connection, if there is one, in both directions."""
    if connection is not None:
        with contextlib.suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and let the kernel close a connection to a machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # also while nobody sends
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_SECONDS / 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
