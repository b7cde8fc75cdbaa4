"""The connection between coordinator and workers skips bad messages and limits unauthenticated peers."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidewheel import unauthenticated
from tidewheel.elastic import sessions
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import MOST_BYTES
from tidewheel.elastic.messages import CoordinatorMessage, FromWorker, Hello, Probed, WorkerMessage, encode
from tidewheel.elastic.server import Server
from tidewheel.elastic.supervision import Supervisor

TOKEN = "secret"
SECONDS = 60.0
"""Longer than any step of these tests takes, even on a busy machine."""


class Handler(sessions.Handler):
    """A handler that records its calls and raises in those named in `fails`."""

    def __init__(self) -> None:
        self.problems: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.opened_names: list[str] = []
        self.closed_names: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ticks = 0
        self.fails: set[str] = set()

    def opened(self, hello: Hello) -> None:
        assert not hello.token, "the server must not pass the token to its handler"
        self.opened_names.append(hello.name)
        self._fail("opened")

    def received(self, name: str, message: WorkerMessage) -> None:
        assert isinstance(message, Probed)
        if message.problem == "fail":
            raise OSError(28, "No space left on device")
        self.problems.put(message.problem)

    def closed(self, name: str) -> None:
        self.closed_names.append(name)
        self._fail("closed")

    def returned(self, name: str, seconds: float) -> None:
        self._fail("returned")

    def tick(self) -> None:
        self.ticks += 1
        self._fail("tick")

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        self._fail("event")
        self.events.append((kind, detail))

    def _fail(self, call: str) -> None:
        if call in self.fails:
            raise RuntimeError(f"{call} fails")

    def errors(self, call: str) -> list[dict[str, Any]]:
        """Return the details of the control errors that the server reported for a call."""
        return [detail for kind, detail in self.events if kind == "control_error" and detail["where"] == call]


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler) -> Iterator[Server]:
    running = Server("127.0.0.1", TOKEN, handler, tick_seconds=0.01)
    running.start()
    yield running
    running.stop()


def worker(server: Server, name: str = "a") -> socket.socket:
    """Connect to a server, send the hello with the token, and return the connection."""
    connection = socket.create_connection(server.address, timeout=SECONDS)
    say(connection, "hello", name=name, node="n", token=TOKEN)
    return connection


def say(connection: socket.socket, type: str, **fields: Any) -> None:
    connection.sendall(json.dumps({"body": {"type": type, **fields}}).encode() + b"\n")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("bad", [
    b"no json\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b"3\n",
    b"{}\n",
    b'{"body": {"type": "unheard of"}}\n',
    b'{"body": {"type": "over"}}\n',
    b'{"body": {"type": "hello", "name": "a", "node": "n", "token": "secret"}}\n',
    b'{"body": {"type": "probed"}}\n',
    b'{"body": {"type": "probed", "problem": 3}}\n',
    b'{"body": {"type": "probed", "problem": "", "more": 1}}\n',
    b'{"body": {"type": "probed", "problem": ""}, "number": "1"}\n',
    b'{"body": {"type": "probed", "problem": ""}, "received": 1' + b"0" * 5000 + b"}\n",
    b'{"body": {"type": "probed", "problem": "fail"}}\n',
    b"x" * (3 * MOST_BYTES) + b"\n",
], ids=["text", "bytes", "deep", "number", "empty", "unknown", "coordinator's", "second hello", "missing", "value",
        "field", "frame", "long number", "handler", "long"])
def test_a_bad_message_is_reported_and_skipped(server: Server, handler: Handler, bad: bytes) -> None:
    with worker(server) as connection:
        for _ in range(3):
            connection.sendall(bad)
        say(connection, "probed", problem="good")
        assert handler.problems.get(timeout=SECONDS) == "good"
        assert handler.closed_names == []
    assert len(handler.events) == 1  # the server reports three equal errors once


@pytest.mark.parametrize("recorded", [True, False])
def test_a_tick_that_fails_is_followed_by_the_next(server: Server, handler: Handler, recorded: bool) -> None:
    handler.fails = {"tick"} if recorded else {"tick", "event"}
    ticks_before = handler.ticks
    until(lambda: handler.ticks > ticks_before + 5)
    assert len(handler.errors("tick")) == recorded
    with worker(server) as connection:
        say(connection, "probed", problem="good")
        assert handler.problems.get(timeout=SECONDS) == "good"


def test_a_worker_that_cannot_be_admitted_is_disconnected(server: Server, handler: Handler) -> None:
    handler.fails = {"opened", "closed"}
    with worker(server) as connection:
        while connection.recv(100):  # the welcome, then the end of the stream
            pass
    until(lambda: bool(handler.errors("hello") and handler.errors("closed")))
    assert handler.closed_names == ["a"]
    handler.fails = set()
    with worker(server) as connection:
        say(connection, "probed", problem="good")
        assert handler.problems.get(timeout=SECONDS) == "good"


@pytest.mark.parametrize("hello", [
    b"",
    b"\n",
    b"{}\n",
    b"[]\n",
    b'{"body": {"type": "hello", "token": "guess", "name": "a", "node": "n"}}\n',
    b'{"body": {"type": "hello", "token": "secret"}}\n',
    b'{"body": {"type": "hello", "token": "\xc3\xbc", "name": "a", "node": "n"}}\n',
    b'{"body": {"type": "hello", "token": "\\ud800", "name": "a", "node": "n"}}\n',
    b'{"body": {"type": "hello", "token": "secret", "name": "a", "node": "n", "more": 1}}\n',
    b'{"body": {"type": "return", "token": "guess", "name": "a", "session": "s"}}\n',
    b'{"body": {"type": "beat", "generation": 0, "step": 0}}\n',
    b"x" * 2 * unauthenticated.HELLO_BYTES,
    b"[" * 4000 + b"\n",
])
def test_a_peer_without_the_token_is_disconnected(server: Server, handler: Handler, hello: bytes) -> None:
    with socket.create_connection(server.address, timeout=SECONDS) as connection:
        connection.sendall(hello)
        if not hello:
            connection.shutdown(socket.SHUT_WR)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass  # the server closed the connection before it read everything
    assert handler.opened_names == []
    assert handler.events == []


def test_a_silent_peer_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, handler: Handler) -> None:
    monkeypatch.setattr("tidewheel.elastic.connection.HELLO_SECONDS", 0.5)
    running = Server("127.0.0.1", TOKEN, handler)
    running.start()
    with socket.create_connection(running.address, timeout=SECONDS) as connection:
        connection.sendall(b'{"token"')
        assert connection.recv(1) == b""
    running.stop()


def test_workers_are_admitted_though_the_coordinator_stood_still_meanwhile(monkeypatch: pytest.MonkeyPatch,
                                                                           handler: Handler) -> None:
    """Importing torch may hold the interpreter's lock for longer than a hello may take. It cost every worker."""
    # long enough to begin to stand still on a busy machine
    monkeypatch.setattr("tidewheel.elastic.connection.HELLO_SECONDS", 4.0)
    running = Server("127.0.0.1", TOKEN, handler)
    running.start()
    connections = [socket.create_connection(running.address, timeout=SECONDS) for _ in range(3)]
    until(lambda: len(running._unauthenticated) == 3)
    stands = threading.Event()

    def stand() -> None:
        stands.set()
        time.sleep(5.0)

    standing = threading.Thread(target=running.call, args=(stand,))
    standing.start()
    assert stands.wait(SECONDS)
    for number, connection in enumerate(connections):
        connection.sendall(encode(FromWorker(Hello(f"w{number}", "n", TOKEN))))
    standing.join()
    for connection in connections:
        assert b'"welcome"' in connection.recv(4096)
        connection.close()
    until(lambda: sorted(handler.opened_names) == ["w0", "w1", "w2"])  # a worker is welcomed first
    running.stop()


def test_many_unauthenticated_peers_keep_no_worker_out(handler: Handler, server: Server) -> None:
    server._unauthenticated._max_connections = 20
    first = worker(server, "first")
    until(lambda: handler.opened_names == ["first"])
    crowd = [socket.create_connection(server.address, timeout=SECONDS) for _ in range(60)]
    with worker(server, "late") as late:
        say(late, "probed", problem="late")
        assert handler.problems.get(timeout=SECONDS) == "late"
    say(first, "probed", problem="first")
    assert handler.problems.get(timeout=SECONDS) == "first"
    assert crowd[0].recv(1) == b""  # the server closed the oldest
    until(lambda: len(server._unauthenticated) <= 20)
    for connection in (first, *crowd):
        connection.close()


def test_a_worker_keeps_reading_after_an_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[Any] = []
    closed = threading.Event()

    def receive(message: CoordinatorMessage) -> None:
        received.append(message.type)
        if message.type == "probe":
            raise KeyError("a handler's error")

    client = Client(listener.getsockname(), Hello("a", "n", TOKEN), receive, closed.set)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b'no json\n{"no": "order"}\n')
        say(connection, "unheard of")
        say(connection, "beat", generation=0, step=0)
        say(connection, "probe")
        say(connection, "stop", generation=3)
        until(lambda: received == ["probe", "stop"])
        assert not closed.is_set()
    assert closed.wait(SECONDS)
    client.close()
    listener.close()


def test_errors_are_counted_and_reported_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events: list[dict[str, Any]] = []
    supervisor = Supervisor(lambda kind, detail: events.append(detail))
    for second in range(121):
        now[0] = float(second)
        supervisor.call("tick", {}.pop, "nothing")
    supervisor.call("tick", int, "no number")
    assert [(detail["where"], detail["times"]) for detail in events] == [("tick", 1), ("tick", 60), ("tick", 60),
                                                                         ("tick", 1)]
    assert events[-1]["error"].startswith("ValueError")
    assert supervisor.errors["tick"] == 122
