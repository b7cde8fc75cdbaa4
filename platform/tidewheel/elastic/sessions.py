"""The coordinator's sessions with worker processes. A session lives through all connections of its process.

A session ends with its process, when the coordinator cuts it, or when the worker does not return in time after its
connection broke. A worker that returns to an ended session gets `End`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidewheel.elastic.client import FLEETING
from tidewheel.elastic.connection import ACKNOWLEDGED, DeliveryLog
from tidewheel.elastic.messages import (
    CoordinatorMessage,
    FromCoordinator,
    FromWorker,
    Hello,
    Here,
    MessageError,
    NodeHello,
    Received,
    Return,
    Welcome,
    WorkerMessage,
    encode,
)
from tidewheel.elastic.supervision import Supervisor


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


class Channel(Protocol):
    """One connection of a worker process."""

    def send(self, frame: FromCoordinator) -> None:
        """Send a frame, unless the connection is closing."""

    def close(self) -> None:
        """Close the connection at once."""


class Direct:
    """A worker's own connection to the coordinator.

    Args:
        writer: its end here.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, frame: FromCoordinator) -> None:
        """Send a frame."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()


@dataclass
class Session:
    """One worker process, through all its connections."""

    name: str
    channel: Channel | None
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

    def disconnect(self) -> None:
        """Close the session's connection, if there is one."""
        if self.deadline is not None:
            self.deadline.cancel()
        channel = self.channel
        self.channel = None
        self.deadline = None
        if channel is not None:
            channel.close()


class Sessions:
    """All sessions by worker. Use it in the server's thread only.

    Args:
        handler: receives what happens.
        supervisor: reports errors of the handler.
        loop: the server's event loop.
    """

    def __init__(self, handler: Handler, supervisor: Supervisor, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._supervisor = supervisor
        self._loop = loop
        self._sessions: dict[str, Session] = {}

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def send(self, name: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker, now or when it has reconnected."""
        session = self._sessions.get(name)
        if session is None:
            return
        if not session.log.pending:
            session.unheard_since = time.monotonic()
        number = session.log.add(message)
        if session.channel is not None:
            session.channel.send(FromCoordinator(message, number))

    def unheard(self, name: str) -> float:
        """Return the seconds for which a connected worker has acknowledged none of the messages that wait for it.

        Heartbeats carry the acknowledgements, so a worker that beats and acknowledges nothing does not hear the
        coordinator.
        """
        session = self._sessions.get(name)
        if session is None or session.channel is None or not session.unheard_since:
            return 0.0
        return time.monotonic() - session.unheard_since

    def stood_still(self, seconds: float) -> None:
        """Note that this process was stopped: acknowledgements of that time wait to be read."""
        for session in self._sessions.values():
            session.unheard_since += seconds if session.unheard_since else 0.0

    def cut(self, name: str) -> None:
        """End a worker's session: close its connection, and tell the worker to end if it returns."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.disconnect()

    def cut_all(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self.cut(name)

    def open(self, hello: Hello, channel: Channel) -> Session | None:
        """Begin the session of a new process; return None if the handler fails to admit it."""
        self.cut(hello.name)
        session = self._sessions[hello.name] = Session(hello.name, channel)
        channel.send(FromCoordinator(Welcome(session.key)))
        if not self._supervisor.call("hello", self._handler.opened, hello):
            self._end(session)  # it would never be given a rank: let it end, so that a new one is started
            return None
        return session

    def find(self, greeting: Return) -> Session | None:
        """Return the session that a returning worker names; None if it is over."""
        session = self._sessions.get(greeting.name)
        if session is None or not hmac.compare_digest(session.key.encode(), greeting.session.encode()):
            return None
        return session

    def welcome_back(self, session: Session, channel: Channel) -> None:
        """Send the answer to `Return`.

        The session moves to this connection only when the worker has answered, see `take_up`: a worker that gave up
        waiting for the welcome leaves its session as it is.
        """
        channel.send(FromCoordinator(Welcome(session.key), received=session.log.received))

    def take_up(self, session: Session, channel: Channel, received: int) -> None:
        """Move a session to a new connection, and send what the worker has not received.

        Args:
            session: the session.
            channel: the connection.
            received: sequence number of the last message that the worker has received.
        """
        seconds = time.monotonic() - session.broke_at if session.broke_at else 0.0
        session.disconnect()
        session.channel = channel
        session.broke_at = 0.0
        session.acknowledge(received)
        session.unheard_since = time.monotonic() if session.log.pending else 0.0
        for number, message in session.log.pending:
            channel.send(FromCoordinator(message, number))
        self._supervisor.call("return", self._handler.returned, session.name, seconds)

    def receive(self, session: Session, frame: FromWorker) -> None:
        """Act on a frame of a worker.

        Raises:
            MessageError: it does not belong inside a session.
        """
        message = frame.body
        if isinstance(message, Hello | Return | Here | NodeHello):
            raise MessageError(f"unexpected message {message.type!r} inside a session")
        log = session.log
        session.acknowledge(frame.received)
        if not log.is_new(frame.number):
            return
        if log.received % ACKNOWLEDGED == 0 and not isinstance(message, FLEETING) and session.channel is not None:
            session.channel.send(FromCoordinator(Received(), received=log.received))
        self._handler.received(session.name, message)

    def broken(self, session: Session, grace: float) -> None:
        """Note that the session's connection is gone; end the session unless the worker returns in `grace` seconds."""
        session.disconnect()
        session.broke_at = time.monotonic()
        if grace:
            session.deadline = self._loop.call_later(grace, self._end, session)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self._supervisor.call("closed", self._handler.closed, session.name)
