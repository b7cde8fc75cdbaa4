"""A TCP proxy that stands in for a failing network."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which closing sends a reset and drops data in flight."""


class Network:
    """A proxy that forwards connections to `target`.

    Args:
        target: host and port on which the coordinator listens.
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
        """Let nothing through from now on.

        The clients' connections time out. The coordinator receives nothing, as if packets were dropped. New
        connections are accepted and not answered.
        """
        self._up.clear()
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for client, server in pairs:
            self._lost.append(server)
            _reset(client)

    def back(self) -> None:
        """Forward new connections again."""
        self._up.set()

    def reset(self) -> None:
        """Reset all connections on both sides, as a firewall does that has forgotten them."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for side in pair:
                _reset(side)

    def close(self) -> None:
        """Stop listening and reset all connections."""
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
            server = socket.create_connection(self._target, timeout=60)
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
        if known:  # one side has closed its connection: close the other one too
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
            source.close()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # wakes threads that read or accept
    connection.close()


@contextlib.contextmanager
def network(target: tuple[str, int]) -> Iterator[Network]:
    """Yield a network in front of `target` while the block runs."""
    proxy = Network(target)
    try:
        yield proxy
    finally:
        proxy.close()
