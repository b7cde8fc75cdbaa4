"""JSON lines over TCP between the coordinator and its workers; an open connection is a sign of life.

The first line of a worker must hold the run's token. Nothing that comes in is executed or unpickled. One bad message,
or one error in whoever handles it, costs that message: it is told, and the connection and the thread live on.

A connection that breaks while both processes live is made again: the worker names its session, and each side sends what
the other has not heard. A session ends with its process (the kernel closes the connection), when the coordinator cuts
it, or when nobody came back in time; whoever comes back to a session that has ended is told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import random
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tidewheel.elastic.supervision import Supervisor
from tidewheel.strangers import HELLO_BYTES, HELLO_SECONDS, Strangers

Message = dict[str, Any]
T = TypeVar("T")

CONNECT_SECONDS = 10.0
AGAIN_SECONDS = 1.0
"""A connection that breaks is tried so long at a time, and again after half of it at most: once the coordinator hears a
worker again, the others have their `heartbeat_seconds`."""
MOST_BYTES = 1 << 20
"""Longest line."""
SILENT_SECONDS = 10.0
"""A connection whose other machine acknowledges nothing for this long is closed by the kernel."""
RECONNECT_SECONDS = 30.0
"""A worker whose connection broke has this long to come back. Then it ends, and the coordinator does without it."""
REFUSED_SECONDS = 3.0
"""Where nobody listens for this long the coordinator's process is gone: it never listens elsewhere."""
RESET_SECONDS = 1.0
"""After a reset the coordinator waits this long for the worker: a process that dies closes its connections instead."""
FLEETING = frozenset({"beat", "step"})
"""What workers say that is not sent again: the next one says more."""
ACKNOWLEDGED = 64
"""The coordinator says so often, in messages, what it has heard."""
_NETWORK = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class Handler(Protocol):
    """Called in the server's thread, one call at a time."""

    def opened(self, name: str, hello: Message) -> None:
        """A worker has shown the token."""

    def received(self, name: str, message: Message) -> None:
        """A worker says something."""

    def returned(self, name: str, seconds: float) -> None:
        """A worker is connected again, `seconds` after its connection was seen to break (0: it was not)."""

    def closed(self, name: str) -> None:
        """Its session is over, and it was not cut."""

    def tick(self) -> None:
        """Some time has passed."""

    def event(self, kind: str, detail: Message) -> None:
        """One of the above has failed."""


@dataclass
class Log:
    """What one side has said and the other may not have heard, and what it has heard itself."""

    said: int = 0
    heard: int = 0
    kept: deque[Message] = field(default_factory=deque)

    def number(self, message: Message) -> Message:
        """Keep `message` until it is acknowledged."""
        self.said += 1
        message = {**message, "n": self.said}
        self.kept.append(message)
        return message

    def acknowledge(self, heard: int) -> None:
        """The other side has heard so many."""
        while self.kept and self.kept[0]["n"] <= heard:
            self.kept.popleft()

    def is_new(self, message: Message) -> bool:
        """Whether a message that came in was not heard before; those without a number are not sent again."""
        number = message.pop("n", None)
        if number is None:
            return True
        new = number > self.heard
        self.heard = max(self.heard, number)
        return new


@dataclass
class Session:
    """One worker process, through all its connections."""

    name: str
    writer: asyncio.StreamWriter | None
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    log: Log = field(default_factory=Log)
    broke_at: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    """When it is over unless the worker comes back."""


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
        self._supervisor, self._strangers = Supervisor(handler.event), Strangers()
        self._sessions: dict[str, Session] = {}
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
        """Tell a worker, at once or when it is connected again. In the server's thread only."""
        session = self._sessions.get(name)
        if session is not None:
            line = session.log.number(message)
            if session.writer is not None and not session.writer.is_closing():
                session.writer.write(_line(line))

    def cut(self, name: str) -> None:
        """Close a worker's connection, hear nothing of it any more, and have it end when it comes back. In the server's
        thread only."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._leave(session)

    def stop(self) -> None:
        """Close everything."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, self.address[0], 0, limit=HELLO_BYTES))
            self.address = (self.address[0], server.sockets[0].getsockname()[1])
        except OSError as error:
            self._problem.append(error)
            return
        finally:
            self._ready.set()
        self._loop.create_task(self._tick())
        self._loop.run_forever()
        server.close()
        for name in list(self._sessions):
            self.cut(name)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            self._supervisor.call("tick", self._handler.tick)

    # -- one connection ----------------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        patience = 0.0
        try:
            hello = await self._greeted(reader, writer)
            if hello is None:
                return
            _tune(writer.get_extra_info("socket"))
            if "again" in hello:
                async with asyncio.timeout(CONNECT_SECONDS):
                    session = await self._come_back(hello, reader, writer)
            else:
                session = self._open(hello, writer)
            if session is not None:
                await self._listen(session, reader, writer)
        except OSError as error:
            patience = RECONNECT_SECONDS if error.errno in _NETWORK else RESET_SECONDS
        except (ValueError, TypeError, KeyError):
            pass  # somebody who comes back to nothing: closed below
        except asyncio.CancelledError:
            session = None  # `stop` was called: nobody is told
        finally:
            writer.transport.abort()
            if session is not None and session.writer is writer:
                self._broken(session, patience)

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
        """The first message of a worker; None: a stranger."""
        with self._strangers.one(writer.transport.abort):
            try:
                async with asyncio.timeout(HELLO_SECONDS):
                    hello = json.loads(await _next_line(reader, HELLO_BYTES))
                shown = str(hello.pop("token", "")).encode(errors="replace")
                known = hmac.compare_digest(shown, self._token.encode())
                return hello if known and isinstance(hello.get("name"), str) else None
            except (TimeoutError, ValueError, AttributeError, TypeError, RecursionError):
                return None

    async def _listen(self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what a worker says until its connection ends, or another takes its place."""
        while True:
            try:
                line = await _next_line(reader, MOST_BYTES, skip=True)
            except ValueError as error:
                self._supervisor.failed("message", error)
                continue
            if not line:
                return
            if session.writer is writer:
                self._supervisor.call("message", self._receive, session, line)

    def _open(self, hello: Message, writer: asyncio.StreamWriter) -> Session | None:
        name = str(hello["name"])
        self.cut(name)
        session = self._sessions[name] = Session(name, writer)
        writer.write(_line({"do": "welcome", "session": session.key, "heard": 0}))
        if not self._supervisor.call("hello", self._handler.opened, name, hello):
            self._over(session)  # it would never be given a rank: it ends, and a new one comes
            return None
        return session

    async def _come_back(self, hello: Message, reader: asyncio.StreamReader,
                         writer: asyncio.StreamWriter) -> Session | None:
        """Go on with the session that a worker names. It is the worker's word, behind the welcome, that counts: one
        that has given up waiting for the welcome leaves the session as it is."""
        name, key = str(hello["name"]), str(hello["again"])
        if self._session(name, key) is not None:
            writer.write(_line({"do": "welcome", "session": key, "heard": self._sessions[name].log.heard}))
            here = json.loads(await _next_line(reader, HELLO_BYTES))
            session = self._session(name, key)
            if session is not None:
                self._take_up(session, writer, int(here["heard"]))
                return session
        writer.write(_line({"do": "end"}))
        await writer.drain()
        await reader.readline()  # it hangs up: an abort before could take the word away
        return None

    def _session(self, name: str, key: str) -> Session | None:
        session = self._sessions.get(name)
        return session if session is not None and hmac.compare_digest(session.key, key) else None

    def _take_up(self, session: Session, writer: asyncio.StreamWriter, heard: int) -> None:
        seconds = time.monotonic() - session.broke_at if session.broke_at else 0.0
        self._leave(session)
        session.writer, session.broke_at = writer, 0.0
        session.log.acknowledge(heard)
        for message in session.log.kept:
            writer.write(_line(message))
        self._supervisor.call("return", self._handler.returned, session.name, seconds)

    def _receive(self, session: Session, line: bytes) -> None:
        message = json.loads(line)
        session.log.acknowledge(int(message.pop("heard", 0)))
        if not session.log.is_new(message):
            return
        if session.log.heard % ACKNOWLEDGED == 0 and message["say"] not in FLEETING and session.writer is not None:
            session.writer.write(_line({"do": "heard", "heard": session.log.heard}))
        self._handler.received(session.name, message)

    def _leave(self, session: Session) -> None:
        """Close the connection that the session has, if any."""
        if session.deadline is not None:
            session.deadline.cancel()
        writer, session.writer, session.deadline = session.writer, None, None
        if writer is not None:
            writer.transport.abort()

    def _broken(self, session: Session, patience: float) -> None:
        """The session's connection is gone; it is over now, or when the worker is not back in time."""
        self._leave(session)
        session.broke_at = time.monotonic()
        if patience:
            session.deadline = self._loop.call_later(patience, self._over, session)
        else:
            self._over(session)

    def _over(self, session: Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self._supervisor.call("closed", self._handler.closed, session.name)


class Client:
    """A worker's end. `on_message` and `on_closed` are called in a thread of its own.

    A connection that breaks is made again, with growing pauses. `on_closed` is called when that does not succeed within
    `reconnect_seconds`, when nobody listens there any more, and when the coordinator goes on without this worker.
    """

    def __init__(self, address: tuple[str, int], hello: Message, on_message: Callable[[Message], None],
                 on_closed: Callable[[], None], *, reconnect_seconds: float = RECONNECT_SECONDS) -> None:
        self._address, self._hello, self._reconnect_seconds = address, hello, reconnect_seconds
        self._on_message, self._on_closed, self._lock = on_message, on_closed, threading.Lock()
        self._closing, self._session, self._log = False, "", Log()
        self._dismissed = False  # told to end
        self._connected = threading.Event()
        self._socket: socket.socket | None = self._connect(CONNECT_SECONDS)
        self._connected.set()
        self._socket.sendall(_line(hello))
        threading.Thread(target=self._run, name="channel", daemon=True).start()

    @property
    def connected(self) -> threading.Event:
        """Set while the coordinator can be reached."""
        return self._connected

    def send(self, message: Message) -> None:
        """Tell the coordinator, now or when it can be reached again."""
        with self._lock:
            fleeting = message["say"] in FLEETING
            message = {**message, "heard": self._log.heard} if fleeting else self._log.number(message)
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the reading thread sees to that
                    self._socket.sendall(_line(message))

    def close(self) -> None:
        """Leave; `on_closed` is not called."""
        self._closing = True
        _close(self._socket)

    def _run(self) -> None:
        while self._socket is not None and not self._closing:
            self._read(self._socket)
            self._connected.clear()
            with self._lock:
                _close(self._socket)
                self._socket = None
            if not self._closing and self._session:  # without a session it was never welcome
                self._reconnect()
        _close(self._socket)
        if not self._closing:
            self._on_closed()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                try:
                    self._hear(json.loads(line))
                except Exception:  # deaf from here on, this worker could not be told to stop
                    traceback.print_exc(file=sys.stderr)

    def _hear(self, message: Message) -> None:
        if message["do"] == "welcome":
            self._session = message["session"]
        elif message["do"] == "heard":
            with self._lock:
                self._log.acknowledge(message["heard"])
        elif self._log.is_new(message):
            self._on_message(message)

    def _reconnect(self) -> None:
        """Set `_socket`, unless that has become hopeless."""
        began = time.monotonic()
        pause, answered = 0.05, began
        while not self._closing:
            left = began + self._reconnect_seconds - time.monotonic()
            try:
                connection = self._connect(AGAIN_SECONDS)
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                answered = answered if refused else time.monotonic()
                if left < 0 or time.monotonic() - answered > REFUSED_SECONDS:
                    return
                time.sleep(pause * random.uniform(0.5, 1.0))  # not all workers at once
                pause = min(2 * pause, AGAIN_SECONDS / 2)
                continue
            # the process that has taken the connection may stand still: it is waited for, and not asked twice
            if self._resume(connection, max(left, 0.1)):
                return
            _close(connection)
            if left < 0 or self._dismissed:
                return

    def _resume(self, connection: socket.socket, seconds: float) -> bool:
        try:
            connection.settimeout(seconds)
            connection.sendall(_line({**self._hello, "again": self._session}))
            answer = json.loads(_read_line(connection))
            if answer["do"] != "welcome":
                self._dismissed = True
                return False
            connection.settimeout(None)
            with self._lock:
                self._log.acknowledge(answer["heard"])
                connection.sendall(_line({"say": "here", "heard": self._log.heard}))
                for message in self._log.kept:
                    connection.sendall(_line(message))
                self._socket = connection
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._connected.set()
        return True

    def _connect(self, seconds: float) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=seconds)
        connection.settimeout(None)
        _tune(connection)
        return connection


async def _next_line(reader: asyncio.StreamReader, most: int, *, skip: bool = False) -> bytes:
    """The next line, b"" at the end of the connection.

    Raises:
        ValueError: it is longer than `most`; with `skip`, it has been read to its end.
    """
    parts: list[bytes] = []
    length = 0
    while not parts or not parts[-1].endswith(b"\n"):
        try:
            part = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return b""  # what a broken connection left of a line is none
        except asyncio.LimitOverrunError as error:  # longer than the reader looks ahead
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


def _read_line(connection: socket.socket) -> bytes:
    """One line and nothing behind it: what follows is for `Client._read`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection was closed")
        line += byte
    return bytes(line)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # also while there is nothing to be said
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_SECONDS / 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
