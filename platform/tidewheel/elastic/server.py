"""The coordinator's end of the connections to its workers: messages as JSON lines over TCP.

An open connection is a sign of life. The first line of a worker must hold the run's token. A bad message, or an error
in the code that handles one, costs only that message: the server reports it and continues.

A connection that breaks while both processes live is restored. The worker names its session, and each side sends what
the other has not received. A session ends with its process (the kernel closes the connection), when the coordinator
cuts it, or when the worker does not return in time. A worker that returns to an ended session gets `End`.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from tidewheel.elastic.connection import MOST_BYTES, RECONNECT_SECONDS, RESET_SECONDS, next_line
from tidewheel.elastic.listener import Listener
from tidewheel.elastic.messages import (
    CoordinatorMessage,
    End,
    Greeting,
    Hello,
    Here,
    Join,
    MessageError,
    NodeHello,
    Return,
    decode_from_worker,
)
from tidewheel.elastic.node_connection import NodeConnection
from tidewheel.elastic.outgoing import Outgoing
from tidewheel.elastic.sessions import Channel, Direct, Handler, Session, Sessions
from tidewheel.elastic.supervision import Supervisor
from tidewheel.unauthenticated import HELLO_BYTES, MAX_CONNECTIONS

__all__ = ["Handler", "Server"]

T = TypeVar("T")

RETURN_SECONDS = 10.0
"""Time limit of the exchange by which a worker continues its session."""
CALL_SECONDS = 30.0
LATE_SECONDS = 1.0
"""A tick that comes later than this was held up by this process itself."""
BACKLOG = 4096
_NETWORK = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class Server(Listener):
    """One thread for the connections of all workers.

    Args:
        host: address to listen on.
        token: token that a worker must show.
        handler: receives what happens on the connections.
        workers: number of workers that may connect at the same time.
        tick_seconds: time between two ticks.
    """

    def __init__(self, host: str, token: str, handler: Handler, *, workers: int = 0, tick_seconds: float = 0.1) -> None:
        super().__init__(host, token, thread="workers' connections", kinds=(Hello, Return, NodeHello), backlog=BACKLOG,
                         most=MAX_CONNECTIONS + workers)
        self._handler = handler
        self._tick_seconds = tick_seconds
        self._supervisor = Supervisor(handler.event)
        self._sessions = Sessions(handler, self._supervisor, self._loop)

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
        self._sessions.send(name, message)

    def send_all(self, names: Collection[str], message: CoordinatorMessage) -> None:
        """Send a message to several workers. Call it in the server's thread only."""
        self._sessions.send_all(names, message)

    def join(self, members: Mapping[str, int], order: Join) -> None:
        """Tell workers to join a generation. Call it in the server's thread only.

        Args:
            members: rank by worker.
            order: the message, with `ANY_RANK`.
        """
        self._sessions.send_all(members, order, members.values())

    def unheard(self, name: str) -> float:
        """Return how long a worker has acknowledged no message, see `Sessions.unheard`.

        Call it in the server's thread only.
        """
        return self._sessions.unheard(name)

    def cut(self, name: str) -> None:
        """End a worker's session: close its connection, and tell the worker to end if it returns.

        Call it in the server's thread only.
        """
        self._sessions.cut(name)

    def _begin(self) -> None:
        self._loop.create_task(self._tick())

    def _end(self) -> None:
        self._sessions.cut_all()

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_seconds)
            now = time.monotonic()
            late = now - before - self._tick_seconds
            before = now
            if late > LATE_SECONDS:
                self._sessions.stood_still(late)
            self._supervisor.call("tick", self._handler.tick)

    # -- one connection ----------------------------------------------------------------------------
    async def _serve(self, greeting: Greeting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        channel = Direct(writer)
        grace = 0.0
        try:
            match greeting:
                case NodeHello(node):
                    await NodeConnection(writer, self._sessions, self._supervisor).serve(reader)
                    self._supervisor.call("relay", self._handler.relay_closed, node)
                case Return():
                    async with asyncio.timeout(RETURN_SECONDS):
                        session = await self._resume(greeting, reader, writer, channel)
                case Hello():
                    session = self._sessions.open(greeting, channel)
            if session is not None:
                await self._listen(session, reader, channel)
        except OSError as error:
            grace = RECONNECT_SECONDS if error.errno in _NETWORK else RESET_SECONDS
        except ValueError:
            pass  # an invalid answer of a worker that returns: its connection is closed below
        except asyncio.CancelledError:
            session = None  # `stop` was called: do not report the session as closed
        finally:
            writer.transport.abort()
            if session is not None and session.channel is channel:
                self._sessions.broken(session, grace)

    async def _listen(self, session: Session, reader: asyncio.StreamReader, channel: Channel) -> None:
        """Pass on a worker's messages until its connection ends, or a newer connection replaces it."""
        while True:
            try:
                line = await next_line(reader, MOST_BYTES, skip=True)
            except ValueError as error:
                self._supervisor.failed("message", error)
                continue
            if not line:
                return
            if session.channel is channel:
                self._supervisor.call("message", self._receive, session, line)

    async def _resume(self, greeting: Return, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                      channel: Channel) -> Session | None:
        """Continue the session that a worker names."""
        session = self._sessions.find(greeting)
        if session is not None:
            self._sessions.welcome_back(session, greeting, channel)
            answer = decode_from_worker(await next_line(reader, HELLO_BYTES))
            if not isinstance(answer.body, Here):
                raise MessageError("a worker that returns must answer the welcome first")
            session = self._sessions.find(greeting)
            if session is not None:
                self._sessions.take_up(session, channel, answer.received)
                return session
        writer.write(Outgoing(End()).line())
        await writer.drain()
        await reader.readline()  # wait until the worker hangs up: an abort could discard the message
        return None

    def _receive(self, session: Session, line: bytes) -> None:
        self._sessions.receive(session, decode_from_worker(line))
