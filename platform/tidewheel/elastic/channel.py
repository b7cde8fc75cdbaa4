"""JSON lines over TCP between the coordinator and its workers; an open connection is a sign of life.

The first line of a worker must hold the run's token. Nothing that comes in is executed or unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Message = dict[str, Any]
T = TypeVar("T")

CONNECT_SECONDS = 10.0
MOST_BYTES = 1 << 20
"""Longest line."""
SILENT_SECONDS = 10.0
"""A connection whose other machine acknowledges nothing for this long is closed by the kernel."""


class Handler(Protocol):
    """Called in the server's thread, one call at a time."""

    def opened(self, name: str, hello: Message) -> None:
        """A worker has shown the token."""

    def received(self, name: str, message: Message) -> None:
        """A worker says something."""

    def closed(self, name: str) -> None:
        """Its connection is gone, and it was not cut."""

    def tick(self) -> None:
        """Some time has passed."""


class Server:
    """The coordinator's end: one thread for all connections.

    Args:
        host: address to listen on.
        token: what a worker must show.
        handler: is told everything.
        tick_seconds: time between two ticks.
    """

    def __init__(self, host: str, token: str, handler: Handler, *, tick_seconds: float = 0.1) -> None:
        self.address: tuple[str, int] = (host, 0)
        self._token, self._handler, self._tick_seconds = token, handler, tick_seconds
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._loop = asyncio.new_event_loop()
        self._ready, self._problem = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    def start(self) -> None:
        """Listen; `address` is set when it returns. OSError when the address is not this machine's."""
        self._thread.start()
        self._ready.wait()
        if self._problem:
            raise self._problem[0]

    def call(self, function: Callable[[], T]) -> T:
        """`function()` in the server's thread; from any other thread."""
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=30)

    def send(self, name: str, message: Message) -> None:
        """Tell a worker, if it is connected. In the server's thread only."""
        writer = self._writers.get(name)
        if writer is not None and not writer.is_closing():
            writer.write(_line(message))

    def cut(self, name: str) -> None:
        """Close a worker's connection, and hear nothing of it any more. In the server's thread only."""
        writer = self._writers.pop(name, None)
        if writer is not None:
            writer.transport.abort()

    def stop(self) -> None:
        """Close everything."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, self.address[0], 0, limit=MOST_BYTES))
            self.address = (self.address[0], server.sockets[0].getsockname()[1])
        except OSError as error:
            self._problem.append(error)
            return
        finally:
            self._ready.set()
        self._loop.create_task(self._tick())
        self._loop.run_forever()
        for name in list(self._writers):
            self.cut(name)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            self._handler.tick()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                hello = json.loads(await reader.readline())
            if not hmac.compare_digest(str(hello.pop("token", "")), self._token):
                return
            _tune(writer.get_extra_info("socket"))
            name = str(hello["name"])
            self.cut(name)
            self._writers[name] = writer
            self._handler.opened(name, hello)
            while line := await reader.readline():
                if self._writers.get(name) is writer:
                    self._handler.received(name, json.loads(line))
        except (OSError, ValueError, KeyError, TimeoutError):
            pass  # a stranger, or a broken connection: closed below
        finally:
            writer.transport.abort()
            if name and self._writers.get(name) is writer:
                del self._writers[name]
                self._handler.closed(name)


class Client:
    """A worker's end. `on_message` and `on_closed` are called in a thread of its own."""

    def __init__(self, address: tuple[str, int], hello: Message, on_message: Callable[[Message], None],
                 on_closed: Callable[[], None]) -> None:
        self._socket = socket.create_connection(address, timeout=CONNECT_SECONDS)
        self._socket.settimeout(None)
        _tune(self._socket)
        self._on_message, self._on_closed, self._lock = on_message, on_closed, threading.Lock()
        self._closing = False
        self.send(hello)
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def send(self, message: Message) -> None:
        """Tell the coordinator; silently nothing when the connection is gone: the reading thread sees to that."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(_line(message))

    def close(self) -> None:
        """Leave; `on_closed` is not called."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._on_message(json.loads(line))
        if not self._closing:
            self._on_closed()


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000))
