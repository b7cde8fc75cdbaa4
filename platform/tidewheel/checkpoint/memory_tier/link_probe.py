"""Measure the link between two agents: round trip, and bytes a second in both directions, bounded in bytes and time."""

from __future__ import annotations

import time
from typing import Any

from tidewheel.checkpoint.memory_tier.protocol import Address, Connection, connect

PINGS = 5
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 22
"""Bytes of the first and the largest piece."""
ENOUGH_SECONDS = 0.05
"""A piece that takes this long is large enough to tell the rate."""
IDLE_SECONDS = 2.0
"""A link on which no byte moves for this long does not work."""
PATTERN = bytes(range(256)) * (FIRST_BYTES // 256)


def measure(address: Address, token: str) -> dict[str, float]:
    """Return "seconds", the shortest round trip, and "up" and "down", bytes a second to and from another agent.

    At most 16 MiB are sent, over a slow link less. The rate is that of the largest piece.

    Raises:
        OSError: the agent cannot be reached, or the link does not work.
    """
    connection = connect(address, token, seconds=IDLE_SECONDS, idle_seconds=IDLE_SECONDS)
    try:
        trips = [_timed(connection, {"op": "ping"}) for _ in range(PINGS)]
        return {"seconds": min(trips), "up": _rate(connection, "take"), "down": _rate(connection, "give")}
    finally:
        connection.close()


def take(connection: Connection, message: dict[str, Any]) -> None:
    """Receive and discard the bytes of a request of `measure`, and answer."""
    left = _size(message)
    while left:
        left -= len(connection.receive_bytes(min(left, FIRST_BYTES)))
    connection.send({})


def give(connection: Connection, message: dict[str, Any]) -> None:
    """Send the bytes that a request of `measure` asks for."""
    connection.send({}, *[PATTERN] * (_size(message) // FIRST_BYTES))


def _rate(connection: Connection, operation: str) -> float:
    size = FIRST_BYTES
    while True:
        began = time.monotonic()
        pieces = size // FIRST_BYTES
        connection.ask({"op": operation, "bytes": size}, *([PATTERN] * pieces if operation == "take" else ()))
        for _ in range(pieces if operation == "give" else 0):
            connection.receive_bytes(FIRST_BYTES)
        seconds = max(time.monotonic() - began, 1e-6)
        if seconds > ENOUGH_SECONDS or size >= MOST_BYTES:
            return size / seconds
        size *= 4


def _timed(connection: Connection, message: dict[str, Any]) -> float:
    began = time.monotonic()
    connection.ask(message)
    return time.monotonic() - began


def _size(message: dict[str, Any]) -> int:
    size = int(message["bytes"])
    if not 0 < size <= MOST_BYTES or size % FIRST_BYTES:
        raise ConnectionError("an impossible number of bytes")  # where the bytes end is unknown: hang up
    return size
