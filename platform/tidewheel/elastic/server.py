"""The coordinator's end of the connections to its workers: messages as JSON lines over TCP.

An open connection is a sign of life. The first line of a worker must hold the run's token. A bad message, or an error
in the code that handles one, costs only that message: the server reports it and continues.

A connection that breaks while both processes live is restored. The worker names its session, and each side sends what
the other has not received. A session ends with its process (the kernel closes the connection), when the coordinator
cuts it, or when the worker does not return in time. A worker that returns to an ended session gets `End`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tidewheel.elastic.client import FLEETING
from tidewheel.elastic.connection import ACKNOWLEDGED, MOST_BYTES, RECONNECT_SECONDS, DeliveryLog, next_line, tune
from tidewheel.elastic.messages import (
    CoordinatorMessage,
    End,
    FromCoordinator,
    FromWorker,
    Greeting,
    Hello,
    Here,
    MessageError,
    Received,
    Return,
    Welcome,
    WorkerMessage,
    decode_from_worker,
    encode,
)
from tidewheel.elastic.supervision import Supervisor
from tidewheel.unauthenticated import HELLO_BYTES, HELLO_SECONDS, MAX_CONNECTIONS, UnauthenticatedConnections

T = TypeVar("T")

RETURN_SECONDS = 10.0
"""Time limit of the exchange by which a worker continues its session."""
RESET_SECONDS = 1.0
"""The coordinator waits this long for a worker after a reset. A process that dies closes its connections instead."""
CALL_SECONDS = 30.0
LATE_SECONDS = 1.0
"""A tick that comes later than this was held up by this process itself."""
BACKLOG = 4096
"""Connections that the kernel holds until they are accepted, if its own limit (net.core.somaxconn) allows so many."""
_NETWORK = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class Handler(Protocol):
    """Receives what happens on a server's connections, one call at a time, in the server's thread."""

    def opened(self, hello: Hello) -> None:
        """Admit a worker that has shown the token."""

    def received(self, name: str, message: WorkerMessage) -> None:
        """Act on a message of a worker."""

    def returned(self, name: str, seconds: float) -> None:
        """Note that a worker has reconnected, `seconds` after its connection broke; 0 for an unnoticed break."""

    def closed(self, name: str) -> None:
        """Note that a worker's session has ended without a `Server.cut`."""

    def tick(self) -> None:
        """Act on the time; the server calls it every `tick_seconds`."""

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        """Record that one of the calls above has failed."""


@dataclass
class Session:
    """One worker process, through all its connections."""

    name: str
    writer: asyncio.StreamWriter | None
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    log: DeliveryLog[CoordinatorMessage] = field(default_factory=DeliveryLog)
    broke_at: float = 0.0
    """When its connection broke, in monotonic seconds; 0.0 while it is connected."""
    deadline: asyncio.TimerHandle | None = None
    """Ends the session unless the worker returns before."""
    unheard_since: float = 0.0
    """Since when, in monotonic seconds, the worker has acknowledged none of the messages that it must acknowledge; 0.0
    if there are none."""

    def acknowledge(self, received: int) -> None:
        """Forget messages that the worker has received."""
        before = len(self.log.pending)
        self.log.acknowledge(received)
        if len(self.log.pending) < before:
            self.unheard_since = time.monotonic() if self.log.pending else 0.0


class Server:
    """One thread for the connections of all workers.

    Args:
        host: address to listen on.
        token: token that a worker must show.
        handler: receives what happens on the connections.
        workers: number of workers that may connect at the same time.
        tick_seconds: time between two ticks.
    """

    def __init__(self, host: str, token: str, handler: Handler, *, workers: int = 0, tick_seconds: float = 0.1) -> None:
        self.address: tuple[str, int] = (host, 0)
        self._token = token
        self._handler = handler
        self._tick_seconds = tick_seconds
        self._supervisor = Supervisor(handler.event)
        self._unauthenticated = UnauthenticatedConnections(MAX_CONNECTIONS + workers)
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="workers' connections", daemon=True)

    def start(self) -> None:
        """Listen, and set `address`.

        Raises:
            OSError: the address is not this machine's.
        """
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the server's thread and return its result; for other threads.

        Raises:
            TimeoutError: the server's thread is busy for `CALL_SECONDS`.
        """
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=CALL_SECONDS)

    def send(self, name: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker, now or when it has reconnected. Call it in the server's thread only."""
        session = self._sessions.get(name)
        if session is None:
            return
        if not session.log.pending:
            session.unheard_since = time.monotonic()
        number = session.log.add(message)
        if session.writer is not None and not session.writer.is_closing():
            session.writer.write(encode(FromCoordinator(message, number)))

    def unheard(self, name: str) -> float:
        """Return the seconds for which a connected worker has acknowledged none of the messages that wait for it.

        Heartbeats carry the acknowledgements, so a worker that beats and acknowledges nothing does not hear the
        coordinator. Call it in the server's thread only.
        """
        session = self._sessions.get(name)
        if session is None or session.writer is None or not session.unheard_since:
            return 0.0
        return time.monotonic() - session.unheard_since

    def cut(self, name: str) -> None:
        """End a worker's session: close its connection, and tell the worker to end if it returns.

        Call it in the server's thread only.
        """
        session = self._sessions.pop(name, None)
        if session is not None:
            _disconnect(session)

    def stop(self) -> None:
        """Close all connections and end the thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, self.address[0], 0, limit=HELLO_BYTES, backlog=BACKLOG))
            self.address = (self.address[0], server.sockets[0].getsockname()[1])
        except OSError as error:
            self._problem = error
            return
        finally:
            self._ready.set()
        self._loop.create_task(self._tick())
        self._loop.run_forever()
        server.close()
        for name in list(self._sessions):
            self.cut(name)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_seconds)
            now = time.monotonic()
            late = now - before - self._tick_seconds
            before = now
            if late > LATE_SECONDS:  # this process was stopped: acknowledgements wait to be read
                for session in self._sessions.values():
                    session.unheard_since += late if session.unheard_since else 0.0
            self._supervisor.call("tick", self._handler.tick)

    # -- one connection ----------------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        grace = 0.0
        try:
            greeting = await self._greeting(reader, writer)
            if greeting is None:
                return
            tune(writer.get_extra_info("socket"))
            if isinstance(greeting, Return):
                async with asyncio.timeout(RETURN_SECONDS):
                    session = await self._resume(greeting, reader, writer)
            else:
                session = self._open(greeting, writer)
            if session is not None:
                await self._listen(session, reader, writer)
        except OSError as error:
            grace = RECONNECT_SECONDS if error.errno in _NETWORK else RESET_SECONDS
        except ValueError:
            pass  # an invalid answer of a worker that returns: its connection is closed below
        except asyncio.CancelledError:
            session = None  # `stop` was called: do not report the session as closed
        finally:
            writer.transport.abort()
            if session is not None and session.writer is writer:
                self._broken(session, grace)

    async def _greeting(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Greeting | None:
        """Return the first message of a worker, without its token; None for an unauthenticated peer."""
        with self._unauthenticated.admitted(writer.transport.abort):
            try:
                greeting = decode_from_worker(await _first_line(reader)).body
            except (TimeoutError, ValueError):
                return None
            if not isinstance(greeting, Hello | Return):
                return None
            known = hmac.compare_digest(greeting.token.encode(), self._token.encode())
            return replace(greeting, token="") if known else None

    async def _listen(self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a worker's messages until its connection ends, or a newer connection replaces it."""
        while True:
            try:
                line = await next_line(reader, MOST_BYTES, skip=True)
            except ValueError as error:
                self._supervisor.failed("message", error)
                continue
            if not line:
                return
            if session.writer is writer:
                self._supervisor.call("message", self._receive, session, line)

    def _open(self, hello: Hello, writer: asyncio.StreamWriter) -> Session | None:
        self.cut(hello.name)
        session = self._sessions[hello.name] = Session(hello.name, writer)
        writer.write(encode(FromCoordinator(Welcome(session.key))))
        if not self._supervisor.call("hello", self._handler.opened, hello):
            self._end(session)  # it would never be given a rank: let it end, so that a new one is started
            return None
        return session

    async def _resume(self, greeting: Return, reader: asyncio.StreamReader,
                      writer: asyncio.StreamWriter) -> Session | None:
        """Continue the session that a worker names.

        The session moves to this connection only after the worker has answered the welcome: a worker that gave up
        waiting for the welcome leaves its session as it is.
        """
        session = self._session(greeting)
        if session is not None:
            writer.write(encode(FromCoordinator(Welcome(session.key), received=session.log.received)))
            answer = decode_from_worker(await next_line(reader, HELLO_BYTES))
            if not isinstance(answer.body, Here):
                raise MessageError("a worker that returns must answer the welcome first")
            session = self._session(greeting)
            if session is not None:
                self._take_up(session, writer, answer.received)
                return session
        writer.write(encode(FromCoordinator(End())))
        await writer.drain()
        await reader.readline()  # wait until the worker hangs up: an abort could discard the message
        return None

    def _session(self, greeting: Return) -> Session | None:
        session = self._sessions.get(greeting.name)
        if session is None or not hmac.compare_digest(session.key.encode(), greeting.session.encode()):
            return None
        return session

    def _take_up(self, session: Session, writer: asyncio.StreamWriter, received: int) -> None:
        seconds = time.monotonic() - session.broke_at if session.broke_at else 0.0
        _disconnect(session)
        session.writer = writer
        session.broke_at = 0.0
        session.acknowledge(received)
        session.unheard_since = time.monotonic() if session.log.pending else 0.0
        for number, message in session.log.pending:
            writer.write(encode(FromCoordinator(message, number)))
        self._supervisor.call("return", self._handler.returned, session.name, seconds)

    def _receive(self, session: Session, line: bytes) -> None:
        frame: FromWorker = decode_from_worker(line)
        message = frame.body
        if isinstance(message, Hello | Return | Here):
            raise MessageError(f"unexpected message {message.type!r} inside a session")
        log = session.log
        session.acknowledge(frame.received)
        if not log.is_new(frame.number):
            return
        if log.received % ACKNOWLEDGED == 0 and not isinstance(message, FLEETING) and session.writer is not None:
            session.writer.write(encode(FromCoordinator(Received(), received=log.received)))
        self._handler.received(session.name, message)

    def _broken(self, session: Session, grace: float) -> None:
        """Note that the session's connection is gone; end the session unless the worker returns in `grace` seconds."""
        _disconnect(session)
        session.broke_at = time.monotonic()
        if grace:
            session.deadline = self._loop.call_later(grace, self._end, session)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self._supervisor.call("closed", self._handler.closed, session.name)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
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


def _disconnect(session: Session) -> None:
    """Close the session's connection, if there is one."""
    if session.deadline is not None:
        session.deadline.cancel()
    writer = session.writer
    session.writer = None
    session.deadline = None
    if writer is not None:
        writer.transport.abort()
