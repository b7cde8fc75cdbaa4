"""The coordinator's sessions with worker processes. A session lives through all connections of its process.

A session ends with its process, when the coordinator cuts it, or when the worker does not return in time after its
connection broke. A worker that returns to an ended session gets `End`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

from tidewheel.elastic.connection import ACKNOWLEDGED, DeliveryLog, answer_seconds
from tidewheel.elastic.messages import (
    Beat,
    CoordinatorMessage,
    FromWorker,
    Hello,
    Here,
    Left,
    MessageError,
    NodeHello,
    Received,
    Return,
    Welcome,
    WorkerMessage,
)
from tidewheel.elastic.outgoing import ANY_RANK, Outgoing
from tidewheel.elastic.supervision import Supervisor


class Handler(Protocol):
    """Receives what happens on a server's connections, one call at a time, in the server's thread."""

    def opened(self, hello: Hello) -> None:
        """Admit a worker that has shown the token."""

    def received(self, name: str, message: WorkerMessage) -> None:
        """Act on a message of a worker that is no `Left` and no `Beat`."""

    def left(self, names: Sequence[str], report: Left) -> None:
        """Act on equal reports of workers that have left their generation."""

    def beats(self, beats: Iterable[tuple[str, Beat]]) -> None:
        """Act on heartbeats of workers."""

    def returned(self, name: str, seconds: float) -> None:
        """Note that a worker has reconnected, `seconds` after its connection broke; 0 for an unnoticed break."""

    def closed(self, name: str) -> None:
        """Note that a worker's session has ended without a `Server.cut`."""

    def relay_closed(self, node: str) -> None:
        """Note that the connection of a node's relay is closed, after those of its workers were found broken."""

    def tick(self) -> None:
        """Act on the time; the server calls it every `tick_seconds`."""

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        """Record that one of the calls above has failed."""


class Channel(Protocol):
    """One connection of a worker process."""

    def send(self, frame: Outgoing, rank: int = ANY_RANK) -> None:
        """Send a frame, with the worker's rank in a `Join`, unless the connection is closing."""

    def close(self) -> None:
        """Close the connection at once."""


class Direct:
    """A worker's own connection to the coordinator.

    Args:
        writer: its end here.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, frame: Outgoing, rank: int = ANY_RANK) -> None:
        """Send a frame."""
        if not self._writer.is_closing():
            self._writer.write(frame.line(rank))

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()


@dataclass
class Session:
    """One worker process, through all its connections."""

    name: str
    channel: Channel | None
    key: str
    connection: int = 0
    """Number of the newest connection on which the worker has said hello or returned."""
    log: DeliveryLog[tuple[Outgoing, int]] = field(default_factory=DeliveryLog)
    """Frames that the worker may not have received, and its rank in them."""
    broke_at: float = 0.0
    """When its connection broke, in monotonic seconds; 0.0 while it is connected."""
    deadline: asyncio.TimerHandle | None = None
    """Ends the session unless the worker returns before."""
    unheard_since: float = 0.0
    """Since when, in monotonic seconds, the worker has acknowledged none of the messages that it must acknowledge; 0.0
    if there are none."""
    answered_at: float = 0.0
    """Monotonic seconds of the last answer to its messages, on a connection of its own."""

    def acknowledge(self, received: int) -> None:
        """Forget messages that the worker has received."""
        pending = self.log.pending
        if pending and pending[0][0] <= received:
            self.log.acknowledge(received)
            self.unheard_since = time.monotonic() if pending else 0.0

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
        self._keys = set[str]()  # of all sessions, also of those that are over
        self._sent = 0  # sequence number of the last message to any worker: a message to several has one number

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def send(self, name: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker, now or when it has reconnected."""
        self.send_all((name,), message)

    def send_all(self, names: Collection[str], message: CoordinatorMessage,
                 ranks: Iterable[int] = repeat(ANY_RANK)) -> None:
        """Send a message to several workers. Its JSON is made once, and a relay gets it once for its workers.

        Args:
            names: the workers.
            message: the message.
            ranks: rank of each worker, for a `Join` without one.
        """
        self._sent += 1
        number = self._sent
        frame = Outgoing(message, number)
        now = time.monotonic()
        sessions = self._sessions
        for name, rank in zip(names, ranks, strict=False):  # thousands: keep it short
            session = sessions.get(name)
            if session is None:
                continue
            pending = session.log.pending
            if not pending:
                session.unheard_since = now
            pending.append((number, (frame, rank)))
            if session.channel is not None:
                session.channel.send(frame, rank)

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
        """Begin the session of a new process, or move it to a newer connection; return None if that is not possible.

        It is not if the handler fails to admit the worker, if the session is over, or if the process has a newer
        connection: a relay that stood still may pass on a hello long after the worker turned away from it.
        """
        known = self._sessions.get(hello.name)
        if hello.key and known is not None and hmac.compare_digest(known.key.encode(), hello.key.encode()):
            if hello.connection <= known.connection:
                return None
            known.connection = hello.connection
            channel.send(Outgoing(Welcome(known.key), received=known.log.received))
            self.take_up(known, channel, 0)
            return known
        if hello.key in self._keys:
            return None
        self.cut(hello.name)
        key = hello.key or secrets.token_hex(8)
        self._keys.add(key)
        session = self._sessions[hello.name] = Session(hello.name, channel, key, hello.connection)
        channel.send(Outgoing(Welcome(key)))
        if not self._supervisor.call("hello", self._handler.opened, hello):
            self._end(session)  # it would never be given a rank: let it end, so that a new one is started
            return None
        return session

    def find(self, greeting: Return) -> Session | None:
        """Return the session that a returning worker names; None if it is over, or used over a newer connection."""
        session = self._sessions.get(greeting.name)
        if session is None or not hmac.compare_digest(session.key.encode(), greeting.session.encode()):
            return None
        return session if greeting.connection >= session.connection else None

    def welcome_back(self, session: Session, greeting: Return, channel: Channel) -> None:
        """Send the answer to `Return`.

        The session moves to this connection only when the worker has answered, see `take_up`: a worker that gave up
        waiting for the welcome leaves its session as it is.

        Args:
            session: the session.
            greeting: the worker's first message on the connection.
            channel: the connection.
        """
        session.connection = greeting.connection
        channel.send(Outgoing(Welcome(session.key), received=session.log.received))

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
        for _, (frame, rank) in session.log.pending:
            channel.send(frame, rank)
        channel.send(Outgoing(Received(), received=session.log.received))  # the worker may close its former connection
        self._supervisor.call("return", self._handler.returned, session.name, seconds)

    def receive(self, session: Session, frame: FromWorker) -> None:
        """Act on a frame of a worker with a connection of its own, and answer it now and then.

        Raises:
            MessageError: it does not belong inside a session.
        """
        now = time.monotonic()
        if now - session.answered_at >= answer_seconds(len(self._sessions)) and session.channel is not None:
            session.answered_at = now
            session.channel.send(Outgoing(Received(), received=session.log.received))
        self.receive_all(frame.body, [(session, frame.number, frame.received)])

    def receive_all(self, message: Any, senders: Iterable[tuple[Session, int | None, int]]) -> None:
        """Act on a message that several workers have sent.

        Args:
            message: what their frames hold.
            senders: session, sequence number and acknowledgement of each.

        Raises:
            MessageError: it does not belong inside a session.
        """
        if isinstance(message, Hello | Return | Here | NodeHello):
            raise MessageError(f"unexpected message {message.type!r} inside a session")
        names = [session.name for session, number, received in senders if self._is_new(session, number, received)]
        if isinstance(message, Left):
            self._handler.left(names, message)
        elif isinstance(message, Beat):
            self._handler.beats([(name, message) for name in names])
        else:
            for name in names:
                self._handler.received(name, message)

    def receive_beats(self, beats: Iterable[tuple[Session, int, Beat]]) -> None:
        """Act on heartbeats: session, acknowledgement and heartbeat of each worker."""
        rows = []
        for session, received, beat in beats:
            session.acknowledge(received)
            rows.append((session.name, beat))
        self._handler.beats(rows)

    def _is_new(self, session: Session, number: int | None, received: int) -> bool:
        """Note a frame; return whether its message was not received before."""
        session.acknowledge(received)
        log = session.log
        if not log.is_new(number):
            return False
        if number is not None and number % ACKNOWLEDGED == 0 and session.channel is not None:
            session.channel.send(Outgoing(Received(), received=log.received))
        return True

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
