"""A worker's end of its connection to the coordinator; `server` has the other end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from tidewheel.elastic.connection import RECONNECT_SECONDS, DeliveryLog, close, read_line, tune
from tidewheel.elastic.messages import (
    Beat,
    CoordinatorMessage,
    End,
    FromWorker,
    Hello,
    Here,
    Received,
    Return,
    StepDone,
    Welcome,
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
        relay: host and port of the node's relay, which is tried first; None without one. The coordinator is reached
            directly once nobody listens there.

    Raises:
        OSError: the coordinator cannot be reached.
    """

    def __init__(self, address: tuple[str, int], hello: Hello, on_message: Callable[[CoordinatorMessage], None],
                 on_closed: Callable[[], None], *, reconnect_seconds: float = RECONNECT_SECONDS,
                 relay: tuple[str, int] | None = None) -> None:
        self._address = address
        self._relay = relay
        self._hello = hello
        self._reconnect_seconds = reconnect_seconds
        self._on_message = on_message
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._log: DeliveryLog[WorkerMessage] = DeliveryLog()
        self._session = ""
        self._closing = False
        self._dismissed = False  # the coordinator ended the session
        self._connected = threading.Event()
        self._socket: socket.socket | None = self._connect(CONNECT_SECONDS)
        self._connected.set()
        self._socket.sendall(encode(FromWorker(hello)))
        threading.Thread(target=self._run, name="coordinator connection", daemon=True).start()

    @property
    def connected(self) -> threading.Event:
        """Set while the coordinator can be reached."""
        return self._connected

    @property
    def welcomed(self) -> bool:
        """Whether the coordinator has accepted this worker."""
        return bool(self._session)

    def send(self, message: WorkerMessage) -> None:
        """Send a message now, or after the next reconnect."""
        with self._lock:
            if isinstance(message, FLEETING):
                frame = FromWorker(message, received=self._log.received)
            else:
                frame = FromWorker(message, self._log.add(message))
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the reading thread reconnects
                    self._socket.sendall(encode(frame))

    def close(self) -> None:
        """Close the connection without calling `on_closed`."""
        self._closing = True
        close(self._socket)

    def _run(self) -> None:
        while self._socket is not None and not self._closing:
            self._read(self._socket)
            self._connected.clear()
            with self._lock:
                close(self._socket)
                self._socket = None
            if not self._closing and self._session:  # a worker that was never accepted does not come back
                self._reconnect()
        close(self._socket)
        if not self._closing:
            self._on_closed()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                try:
                    self._receive(line)
                except Exception:  # keep reading: a worker that does not read cannot be stopped
                    logger.exception("a message of the coordinator was ignored")

    def _receive(self, line: bytes) -> None:
        frame = decode_from_coordinator(line)
        with self._lock:
            self._log.acknowledge(frame.received)
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
            if self._resume(connection, max(left, 0.1)):
                return
            close(connection)
            if left < 0 or self._dismissed:
                return

    def _resume(self, connection: socket.socket, seconds: float) -> bool:
        """Continue the session on a new connection; return whether that succeeded."""
        try:
            connection.settimeout(seconds)
            connection.sendall(encode(FromWorker(Return(self._hello.name, self._hello.token, self._session))))
            answer = decode_from_coordinator(read_line(connection))
            if not isinstance(answer.body, Welcome):
                self._dismissed = True
                return False
            connection.settimeout(None)
            with self._lock:
                self._log.acknowledge(answer.received)
                connection.sendall(encode(FromWorker(Here(), received=self._log.received)))
                for number, message in self._log.pending:
                    connection.sendall(encode(FromWorker(message, number)))
                self._socket = connection
        except (OSError, ValueError):
            return False
        self._connected.set()
        return True

    def _connect(self, seconds: float) -> socket.socket:
        try:
            connection = socket.create_connection(self._relay or self._address, timeout=seconds)
        except ConnectionRefusedError:
            if self._relay is None:
                raise
            self._relay = None  # it has ended; the session continues without it
            connection = socket.create_connection(self._address, timeout=seconds)
        connection.settimeout(None)
        tune(connection)
        return connection
