"""What workers and agents say to each other: JSON messages, some followed by raw bytes, over TCP.

Both sides prove that they know the run's token before anything else is said, without sending it. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.strangers import HELLO_BYTES, HELLO_SECONDS

MAX_MESSAGE_BYTES = 256 << 20
"""Of the JSON of one message; the longest is the table of a worker's tensors."""
CONNECT_SECONDS = 5.0
"""For a connection that is to be kept: a machine may be busy."""
PATIENCE_SECONDS = 10.0
"""A connection on which nothing moves for so long is given up."""


class Address(NamedTuple):
    """Where an agent listens."""

    host: str
    port: int


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file, which the kernel sends without copying them: they stay as they are until the
    other side has answered."""

    path: Path
    start: int
    stop: int


class Connection:
    """One connected socket; not for use by two threads at once."""

    def __init__(self, sock: socket.socket, patience: float | None = PATIENCE_SECONDS) -> None:
        sock.settimeout(patience)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._until = math.inf

    def send(self, message: dict[str, Any], *payloads: Any) -> None:
        """Send a message, and the bytes of `payloads`, bytes-like or `FileRange`, behind it.

        Raises:
            OSError: the other side is gone, or does not take anything for too long.
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
        """The next message, of at most `most` bytes; what follows it is read with `receive_into`.

        Raises:
            OSError: the other side is gone, says nothing for too long, or nothing that can be understood.
        """
        length = int.from_bytes(self.receive_bytes(4), "big")
        if length > most:
            raise ConnectionError(f"a message of {length} bytes is announced, more than {most}")
        try:
            message = json.loads(self.receive_bytes(length))
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"this is no message: {error}") from None
        if not isinstance(message, dict):
            raise ConnectionError("this is no message: not a group of values")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        while view:
            if self._until < math.inf:
                self._socket.settimeout(max(0.001, self._until - time.monotonic()))
            found = self._socket.recv_into(view)
            if not found:
                raise ConnectionError("the connection was closed")
            view = view[found:]

    def receive_bytes(self, length: int) -> bytes:
        """The next `length` bytes."""
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def ask(self, message: dict[str, Any], *payloads: Any) -> dict[str, Any]:
        """Send, and receive the answer.

        Raises:
            OSError: as above, or the other side answers that it cannot.
        """
        self.send(message, *payloads)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The answer to what was sent; ConnectionError when it says that it cannot."""
        message = self.receive()
        if "problem" in message:
            raise ConnectionError(str(message["problem"]))
        return message

    def patience(self, seconds: float | None) -> None:
        """From now on wait so long for the other side; None: for ever."""
        self._until = math.inf
        self._socket.settimeout(seconds)

    def hurry(self, seconds: float) -> None:
        """Until the next call of `patience`, all that is received must have come within `seconds`, however slowly."""
        self._until = time.monotonic() + seconds

    def close(self) -> None:
        """Let go; a thread that waits on it wakes up."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: Address, token: str, *, seconds: float = CONNECT_SECONDS,
            patience: float | None = PATIENCE_SECONDS) -> Connection:
    """A connection to an agent of the run with this token.

    Raises:
        OSError: nothing answers there within `seconds`, or it does not know the token.
    """
    connection = Connection(socket.create_connection((address.host, address.port), timeout=seconds), seconds)
    try:
        connection.hurry(HELLO_SECONDS)
        theirs = str(connection.receive(HELLO_BYTES).get("nonce"))
        mine = secrets.token_hex(16)
        answer = connection.ask({"nonce": mine, "proof": _proof(token, "client", theirs, mine)})
        if not _same(answer.get("proof"), _proof(token, "agent", theirs, mine)):
            raise ConnectionError(f"{address.host}:{address.port} is not an agent of this run")
    except BaseException:
        connection.close()
        raise
    connection.patience(patience)
    return connection


def admit(sock: socket.socket, token: str) -> Connection:
    """The agent's side of `connect`; ConnectionError, and the socket is closed, when the other does not know the
    token."""
    connection = Connection(sock)
    try:
        connection.hurry(HELLO_SECONDS)
        mine = secrets.token_hex(16)
        connection.send({"nonce": mine})
        hello = connection.receive(HELLO_BYTES)
        theirs = str(hello.get("nonce"))
        if not _same(hello.get("proof"), _proof(token, "client", mine, theirs)):
            raise ConnectionError("the token is not that of this run")
        connection.send({"proof": _proof(token, "agent", mine, theirs)})
    except BaseException:
        connection.close()
        raise
    connection.patience(None)
    return connection


def _proof(token: str, role: str, *nonces: str) -> str:
    return hmac.new(token.encode(), " ".join((role, *nonces)).encode(errors="replace"), "sha256").hexdigest()


def _same(shown: Any, proof: str) -> bool:
    return hmac.compare_digest(str(shown).encode(errors="replace"), proof.encode())
