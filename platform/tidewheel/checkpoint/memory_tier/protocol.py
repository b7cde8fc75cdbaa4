"""The connection between workers and agents: JSON messages over TCP, some followed by raw bytes.

First, both sides prove that they know the run's token, without sending it. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.unauthenticated import HELLO_BYTES, HELLO_SECONDS

MAX_MESSAGE_BYTES = 256 << 20
"""Limit of a message's JSON. The longest message is the table of a worker's tensors."""
CONNECT_SECONDS = 5.0
"""Time limit for connecting, when the connection will be kept: the machine may be busy."""
IDLE_SECONDS = 10.0
"""A connection on which no byte moves for this long is given up."""


class Address(NamedTuple):
    """Host and port that an agent listens on."""

    host: str
    port: int


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file. The kernel sends them without a copy, so they must not change until the peer has
    answered."""

    path: Path
    start: int
    stop: int


class Connection:
    """A connected socket. Not safe for concurrent use, except for `close`.

    Args:
        sock: the socket; the connection closes it.
        idle_seconds: give up when no byte moves for this long; None: never.
    """

    def __init__(self, sock: socket.socket, idle_seconds: float | None = IDLE_SECONDS) -> None:
        sock.settimeout(idle_seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._deadline = math.inf

    def send(self, message: dict[str, Any], *payloads: Any) -> None:
        """Send a message, followed by the bytes of `payloads`.

        Args:
            message: JSON values.
            payloads: bytes-like objects or `FileRange`.

        Raises:
            OSError: the connection is broken, or the peer takes no byte for too long.
        """
        text = json.dumps(message).encode()
        self._socket.sendall(len(text).to_bytes(4, "big") + text)
        for payload in payloads:
            if isinstance(payload, FileRange):
                with open(payload.path, "rb") as file:
                    self._socket.sendfile(file, payload.start, payload.stop - payload.start)
            else:
                self._socket.sendall(payload)

    def receive(self, most: int = MAX_MESSAGE_BYTES) -> dict[str, Any]:
        """Return the next message. Read the bytes that follow it with `receive_into`.

        Args:
            most: limit of the message's length in bytes.

        Raises:
            OSError: the connection is broken, the peer sends nothing for too long, or it does not send a message.
        """
        length = int.from_bytes(self.receive_bytes(4), "big")
        if length > most:
            raise ConnectionError(f"the peer announces a message of {length} bytes, more than {most}")
        try:
            message = json.loads(self.receive_bytes(length))
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"not a message: {error}") from None
        if not isinstance(message, dict):
            raise ConnectionError("not a message: not a JSON object")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes.

        Raises:
            OSError: the connection is broken, or the peer sends nothing for too long.
        """
        while view:
            if self._deadline < math.inf:
                self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionError("the connection was closed")
            view = view[received:]

    def receive_bytes(self, length: int) -> bytes:
        """Return the next `length` bytes.

        Raises:
            OSError: as `receive_into`.
        """
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def ask(self, message: dict[str, Any], *payloads: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            message: JSON values.
            payloads: bytes-like objects or `FileRange`.

        Raises:
            OSError: the connection is broken, or the peer answers with a problem.
        """
        self.send(message, *payloads)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last request.

        Raises:
            OSError: the connection is broken, or the peer answers with a problem.
        """
        message = self.receive()
        if "problem" in message:
            raise ConnectionError(str(message["problem"]))
        return message

    def has_answer(self) -> bool:
        """Return whether the peer has begun to answer, or hung up; does not wait."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def set_idle_limit(self, seconds: float | None) -> None:
        """Give up when no byte moves for `seconds` (None: never), and remove the deadline."""
        self._deadline = math.inf
        self._socket.settimeout(seconds)

    def set_deadline(self, seconds: float) -> None:
        """Receive everything within `seconds` from now, however many bytes move, until `set_idle_limit` is called."""
        self._deadline = time.monotonic() + seconds

    def close(self) -> None:
        """Hang up; a thread that waits on the connection wakes up."""
        with contextlib.suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: Address, token: str, *, seconds: float = CONNECT_SECONDS,
            idle_seconds: float | None = IDLE_SECONDS) -> Connection:
    """Connect to an agent of the run.

    Args:
        address: the agent's.
        token: the run's secret.
        seconds: time limit for connecting, and again for the exchange of proofs.
        idle_seconds: give up later when no byte moves for this long; None: never.

    Raises:
        OSError: no agent answers at `address` in time, or it does not know the token.
    """
    connection = Connection(socket.create_connection((address.host, address.port), timeout=seconds), seconds)
    try:
        connection.set_deadline(min(seconds, HELLO_SECONDS))  # a frozen agent's kernel accepts connections
        theirs = str(connection.receive(HELLO_BYTES).get("nonce"))
        own_nonce = secrets.token_hex(16)
        answer = connection.ask({"nonce": own_nonce, "proof": _proof(token, "client", theirs, own_nonce)})
        if not _matches(answer.get("proof"), _proof(token, "agent", theirs, own_nonce)):
            raise ConnectionError(f"{address.host}:{address.port} is not an agent of this run")
    except BaseException:
        connection.close()
        raise
    connection.set_idle_limit(idle_seconds)
    return connection


def authenticate(sock: socket.socket, token: str) -> Connection:
    """Return the agent's end of `connect` once the client has proved that it knows the token.

    Raises:
        OSError: the client does not know the token, or the connection is broken. The socket is closed.
    """
    connection = Connection(sock)
    try:
        connection.set_deadline(HELLO_SECONDS)
        own_nonce = secrets.token_hex(16)
        connection.send({"nonce": own_nonce})
        hello = connection.receive(HELLO_BYTES)
        theirs = str(hello.get("nonce"))
        if not _matches(hello.get("proof"), _proof(token, "client", own_nonce, theirs)):
            raise ConnectionError("the token is not that of this run")
        connection.send({"proof": _proof(token, "agent", own_nonce, theirs)})
    except BaseException:
        connection.close()
        raise
    connection.set_idle_limit(None)
    return connection


def _proof(token: str, role: str, *nonces: str) -> str:
    return hmac.new(token.encode(), " ".join((role, *nonces)).encode(errors="replace"), "sha256").hexdigest()


def _matches(received: Any, proof: str) -> bool:
    return hmac.compare_digest(str(received).encode(errors="replace"), proof.encode())
