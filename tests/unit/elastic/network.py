"""A TCP proxy in the place of a network that fails."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset and drops what is under way."""


class Network:
    """Forwards connections to `target`.

    Args:
        target: where the coordinator listens.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._lock = target, threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lost: list[socket.socket] = []
        self._up = threading.Event()
        self._up.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def away(self) -> None:
        """From now on nothing goes through. Clients find their connections timed out; the coordinator hears nothing,
        as if packets were dropped; new connections are taken and not answered."""
        self._up.clear()
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for client, server in pairs:
            self._lost.append(server)
            _reset(client)

    def back(self) -> None:
        """Everything works again."""
        self._up.set()

    def reset(self) -> None:
        """Reset all connections, on both sides, as a firewall that forgets them does."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for side in pair:
                _reset(side)

    def close(self) -> None:
        """Nobody listens here any more."""
        self._up.set()
        _reset(self._listener)
        self.reset()
        for server in self._lost:
            _reset(server)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._up.wait()
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        for source, sink in (pair, pair[::-1]):
            threading.Thread(target=self._forward, args=(pair, source, sink), daemon=True).start()

    def _forward(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if pair not in self._pairs:
                        return
                    sink.sendall(data)
        with self._lock:
            known = pair in self._pairs
            self._pairs.discard(pair)
        if known:  # one side has hung up: so the other one is told
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
            source.close()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # wakes who reads or accepts
    connection.close()


@contextlib.contextmanager
def network(target: tuple[str, int]) -> Iterator[Network]:
    """A network in front of `target`, for as long as the block runs."""
    made = Network(target)
    try:
        yield made
    finally:
        made.close()
