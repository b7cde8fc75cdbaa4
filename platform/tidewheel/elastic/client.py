"""A worker's end of its connection to the coordinator; `server` has the other end."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tidewheel.elastic.connection import (
    RECONNECT_SECONDS,
    DeliveryLog,
    SilentError,
    close,
    lines_of,
    read_line,
    tune,
)
from tidewheel.elastic.messages import (
    Beat,
    CoordinatorMessage,
    End,
    FromCoordinator,
    FromWorker,
    Hello,
    Here,
    Received,
    Return,
    StepDone,
    Welcome,
    WorkerEvent,
    WorkerMessage,
    decode_from_coordinator,
    encode,
)
from tidewheel.retry import JITTER

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
RETRY_SECONDS = 1.0
"""Time limit of one attempt to reconnect; the pause between two attempts is at most half of it. So all workers are back
soon after the first, well within `heartbeat_seconds`."""
REFUSED_SECONDS = 3.0
"""The coordinator's process is gone once connections are refused for this long: its address never changes."""
RELAY_SHARE = 0.25
"""A worker leaves a relay that is silent for this share of `heartbeat_seconds`. By then the coordinator has not heard
it for at most this share and twice the time between two heartbeats, which is less than the whole."""
FLEETING = (Beat, StepDone)
"""Messages that are not resent after a reconnect, because the next one replaces them."""


class Client:
    """The connection of one worker process. It reconnects after a break, with growing pauses.

    Args:
        address: host and port of the coordinator.
        hello: the worker's first message.
        on_message: called with each message of the coordinator, in the client's thread.
        on_closed: called in that thread when the client gives up: it could not reconnect within `reconnect_seconds`,
            no process listens at `address` any more, or the coordinator dropped this worker.
        reconnect_seconds: time limit of all attempts to reconnect.
        relay: host and port of the node's relay; None: connect directly. A relay that ends, cannot be reached, or is
            silent for `relay_seconds` is left for good: from then on the worker has a connection of its own.
        relay_seconds: time limit for a sign of life of the relay.

    Raises:
        OSError: the coordinator cannot be reached.
    """

    def __init__(self, address: tuple[str, int], hello: Hello, on_message: Callable[[CoordinatorMessage], None],
                 on_closed: Callable[[], None], *, reconnect_seconds: float = RECONNECT_SECONDS,
                 relay: tuple[str, int] | None = None, relay_seconds: float = 3.0 * RELAY_SHARE) -> None:
        self._address = address
        self._relay = relay
        self._relay_seconds = relay_seconds
        self._hello = replace(hello, key=secrets.token_hex(16))
        self._reconnect_seconds = reconnect_seconds
        self._on_message = on_message
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._log: DeliveryLog[WorkerMessage] = DeliveryLog()
        self._session = ""
        self._connections = 0
        self._former: socket.socket | None = None  # through the relay, until the coordinator uses another
        self._broken_line = False  # a relay did not take a whole message in time: nothing may follow its first part
        self._waits_since: float | None = None  # monotonic time of the first message since the last answer
        self._closing = False
        self._dismissed = False  # the coordinator ended the session
        self._connected = threading.Event()
        self._socket: socket.socket | None = None
        connection = self._connect(CONNECT_SECONDS)
        connection.sendall(encode(FromWorker(self._greeting())))
        self._use(connection)
        threading.Thread(target=self._run, name="coordinator connection", daemon=True).start()

    @property
    def connected(self) -> threading.Event:
        """Set while the coordinator can be reached."""
        return self._connected

    @property
    def welcomed(self) -> bool:
        """Whether the coordinator has accepted this worker."""
        return bool(self._session)

    @property
    def unanswered(self) -> float:
        """Seconds since the first message that the coordinator, or the relay, has not answered; 0.0 if there is none.

        It answers within `connection.answer_seconds` and the time between two heartbeats.
        """
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def send(self, message: WorkerMessage) -> None:
        """Send a message now, or after the next reconnect."""
        with self._lock:
            if self._waits_since is None:
                self._waits_since = time.monotonic()
            if isinstance(message, FLEETING):
                frame = FromWorker(message, received=self._log.received)
            else:
                frame = FromWorker(message, self._log.add(message))
            if self._socket is not None and not self._broken_line:
                try:
                    self._socket.sendall(encode(frame))
                except BlockingIOError:  # the time limit of a relay; the reading thread leaves it
                    self._broken_line = True
                except OSError:
                    pass  # the connection is closed; the reading thread reconnects

    def close(self) -> None:
        """Close the connection without calling `on_closed`."""
        self._closing = True
        close(self._socket)
        close(self._former)

    def _run(self) -> None:
        while self._socket is not None and not self._closing:
            relayed = self._relay is not None
            silent = self._read(self._socket, relayed)
            self._connected.clear()
            with self._lock:
                former = self._socket
                self._socket = None
                self._broken_line = False
            if silent:  # a relay that is only slow would report a closed connection as the end of this process
                self._former = former
            else:
                close(former)
            if relayed and not self._closing and (silent or not self._session):
                self._leave_relay(f"it was silent for {self._relay_seconds:g} s" if silent else "it ended")
            if not self._closing and (self._session or relayed):  # else it was never accepted and does not come back
                self._reconnect()
        close(self._socket)
        if not self._closing:
            self._on_closed()

    def _read(self, connection: socket.socket, relayed: bool) -> bool:
        """Act on what arrives until the connection ends; return whether a relay is silent, or takes nothing."""
        try:
            for line in lines_of(connection, self._relay_seconds if relayed else None):
                try:
                    self._receive(line)
                except Exception:  # keep reading: a worker that does not read cannot be stopped
                    logger.exception("a message of the coordinator was ignored")
                if relayed and self._broken_line:
                    return True
        except SilentError:
            return True
        except OSError:
            pass  # the connection broke
        return False

    def _leave_relay(self, why: str) -> None:
        """Use a connection of its own from now on."""
        logger.warning("leaves the relay at %s and connects to the coordinator directly: %s", self._relay, why)
        self._relay = None
        self.send(WorkerEvent("relay_left", {"worker": self._hello.name, "node": self._hello.node, "reason": why},
                              time.time()))

    def _receive(self, line: bytes) -> None:
        frame = decode_from_coordinator(line)
        self._waits_since = None
        with self._lock:
            self._log.acknowledge(frame.received)
        if self._former is not None:  # the coordinator has taken up this connection
            close(self._former)
            self._former = None
        match frame.body:
            case Welcome(session):
                self._session = session
            case End() | Received():
                pass  # an end counts only as the answer to `Return`
            case message if self._log.is_new(frame.number):
                self._on_message(message)

    def _reconnect(self) -> None:
        """Set `_socket`, or leave it None when reconnecting is hopeless."""
        began = time.monotonic()
        pause = 0.05
        answered = began
        while not self._closing:
            left = began + self._reconnect_seconds - time.monotonic()
            try:
                connection = self._connect(RETRY_SECONDS)
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError):
                    answered = time.monotonic()
                if left < 0 or time.monotonic() - answered > REFUSED_SECONDS:
                    return
                time.sleep(pause * JITTER.uniform(0.5, 1.0))  # not all workers at once
                pause = min(2 * pause, RETRY_SECONDS / 2)
                continue
            # a process that accepts the connection may be stopped: wait for it, and do not connect twice
            relayed = self._relay is not None
            if self._resume(connection, relayed, max(left, 0.1)):
                return
            close(connection)
            if left < 0 or self._dismissed or not (self._session or relayed):
                return

    def _resume(self, connection: socket.socket, relayed: bool, seconds: float) -> bool:
        """Continue the session on a new connection, or begin it; return whether that succeeded.

        Args:
            connection: the new connection.
            relayed: whether it is one to the relay.
            seconds: time limit.
        """
        until = time.monotonic() + seconds
        returns = bool(self._session)
        try:
            connection.settimeout(min(seconds, self._relay_seconds) if relayed else seconds)
            connection.sendall(encode(FromWorker(self._greeting())))
            answer = self._answer(connection, until)
            if not isinstance(answer.body, Welcome):
                self._dismissed = True
                return False
            if returns:
                connection.sendall(encode(FromWorker(Here(), received=self._log.received)))
            self._session = answer.body.session
            with self._lock:
                self._log.acknowledge(answer.received)
            self._use(connection)
        except TimeoutError:
            if relayed:
                self._leave_relay(f"it was silent for {self._relay_seconds:g} s")
            return False
        except (OSError, ValueError):
            if relayed and not returns:
                self._leave_relay("it closed the connection")
            return False
        return True

    def _greeting(self) -> Hello | Return:
        """Return the first message on the next connection."""
        self._connections += 1
        if not self._session:
            return replace(self._hello, connection=self._connections)
        return Return(self._hello.name, self._hello.token, self._session, self._connections)

    def _answer(self, connection: socket.socket, until: float) -> FromCoordinator:
        """Return the first frame of the coordinator behind the relay's signs of life.

        Raises:
            OSError: there is none until this monotonic time, or the connection ends.
        """
        while True:
            frame = decode_from_coordinator(read_line(connection))
            if not isinstance(frame.body, Received):
                return frame
            if time.monotonic() > until:
                raise ConnectionError("the relay cannot reach the coordinator")

    def _use(self, connection: socket.socket) -> None:
        """Send what the coordinator has not received, and everything from now on."""
        connection.settimeout(None)
        with self._lock:
            for number, message in self._log.pending:
                connection.sendall(encode(FromWorker(message, number)))
            self._socket = connection
        self._connected.set()

    def _connect(self, seconds: float) -> socket.socket:
        if self._relay is not None:
            try:
                connection = self._connect_to(self._relay, min(seconds, self._relay_seconds))
                # a message for a relay that reads nothing must not hold the lock that the reading thread needs
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(2 * self._relay_seconds))
                return connection
            except OSError as error:
                self._leave_relay(f"it cannot be reached: {error}")
        return self._connect_to(self._address, seconds)

    @staticmethod
    def _connect_to(address: tuple[str, int], seconds: float) -> socket.socket:
        connection = socket.create_connection(address, timeout=seconds)
        connection.settimeout(None)
        tune(connection)
        return connection


def _timeval(seconds: float) -> bytes:
    """Return a time as the C structure that socket options take."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
