"""The relay of a node between its workers and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from tests.unit.elastic.network import TOKEN, network
from tests.unit.elastic.relay_process import RelayProcess
from tests.unit.elastic.test_connection import until
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.elastic import sessions
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import MOST_BYTES, Endpoint
from tidewheel.elastic.messages import (
    Abort,
    AgentTable,
    Beat,
    CoordinatorMessage,
    ExitReason,
    FromCoordinator,
    Hello,
    Join,
    Left,
    MemoryPlacement,
    Raise,
    Stop,
    TakenOver,
    WorkerEvent,
    WorkerMessage,
    encode,
    frame_line,
)
from tidewheel.elastic.node_messages import Groups, Orders, split
from tidewheel.elastic.node_relay import NodeRelay
from tidewheel.elastic.outgoing import ANY_RANK, Outgoing, with_rank
from tidewheel.elastic.server import Server
from tidewheel.train.history import RunHistory

TABLE = MemoryPlacement(AgentTable((Address("h0", 1), Address("h1", 2)), {"rack": (0, 1)}, "t"), ((0, 2, 4),))


class Handler(sessions.Handler):
    """A recorder of the calls that a server makes to its handler."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.values: dict[str, list[int]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.newest: dict[str, Beat] = {}
        self.reports: list[tuple[list[str], str]] = []

    def opened(self, hello: Hello) -> None:
        self.calls.append(("opened", hello.name))

    def received(self, name: str, message: WorkerMessage) -> None:
        if isinstance(message, WorkerEvent):
            if message.kind == "said":
                self.values.setdefault(name, []).append(message.detail["value"])
            else:
                self.events.append((message.kind, message.detail))

    def left(self, names: Sequence[str], report: Left) -> None:
        self.reports.append((sorted(names), report.text))

    def beats(self, beats: Iterable[tuple[str, Beat]]) -> None:
        self.newest.update(beats)

    def returned(self, name: str, seconds: float) -> None:
        self.calls.append(("returned", name))

    def closed(self, name: str) -> None:
        self.calls.append(("closed", name))

    def tick(self) -> None:
        return

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        self.calls.append((kind, detail["error"]))


class Worker:
    """A client that records the messages that it receives."""

    def __init__(self, server: Server, relay: NodeRelay | RelayProcess, name: str, token: str = TOKEN,
                 relay_seconds: float = 60.0) -> None:
        self.received: list[CoordinatorMessage] = []
        self.ended = threading.Event()
        self.client = Client(server.address, Hello(name, "n", token), self.received.append, self.ended.set,
                             relay=relay.address, relay_seconds=relay_seconds)

    def say(self, value: int) -> None:
        self.client.send(WorkerEvent("said", {"value": value}, 0.0))


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def relay(server: Server) -> Iterator[NodeRelay]:
    running = NodeRelay("127.0.0.1", Endpoint(server.address, TOKEN), "n", lambda: None)
    running.start()
    yield running
    running.stop()


def send(server: Server, names: str, message: CoordinatorMessage) -> None:
    server.call(lambda: server.send_all(names, message))


def test_workers_and_coordinator_exchange_messages_through_the_relay(server: Server, relay: NodeRelay,
                                                                     handler: Handler) -> None:
    workers = [Worker(server, relay, name) for name in "ab"]
    until(lambda: len(handler.calls) == 2)
    orders = [Abort(1), Stop(2, save=True), Raise("over"), Join(3, 1, 2, ("h", 1), TABLE, RunHistory())]
    for order in orders:
        send(server, "ab", order)
    for worker in workers:
        worker.say(1)
        worker.say(2)
        worker.client.send(Beat(3, 7, 1.5, 1))
    until(lambda: all(len(worker.received) == len(orders) for worker in workers))
    until(lambda: handler.values == {"a": [1, 2], "b": [1, 2]} and handler.newest == {name: Beat(3, 7, 1.5, 1)
                                                                                     for name in "ab"})
    assert [worker.received for worker in workers] == [orders, orders]
    assert sorted(handler.calls) == [("opened", "a"), ("opened", "b")]
    for worker in workers:
        worker.client.close()
    until(lambda: sorted(handler.calls)[:2] == [("closed", "a"), ("closed", "b")])


def test_equal_reports_of_a_node_are_one(server: Server, relay: NodeRelay, handler: Handler) -> None:
    workers = [Worker(server, relay, name) for name in "abc"]
    until(lambda: len(handler.calls) == 3)
    for worker, text in zip(workers, ("closed", "closed", "full"), strict=True):
        worker.client.send(Left(3, ExitReason.FAILED, text))
    until(lambda: sum(len(names) for names, _ in handler.reports) == 3)
    assert {(name, text) for names, text in handler.reports for name in names} == {
        ("a", "closed"), ("b", "closed"), ("c", "full")}
    for worker in workers:
        worker.client.close()


def test_a_worker_that_is_cut_off_ends_and_its_neighbour_does_not(server: Server, relay: NodeRelay,
                                                                  handler: Handler) -> None:
    workers = {name: Worker(server, relay, name) for name in "ab"}
    until(lambda: all(worker.client.welcomed for worker in workers.values()))
    server.call(lambda: server.cut("a"))
    assert workers["a"].ended.wait(60)
    workers["b"].say(1)
    until(lambda: handler.values == {"b": [1]})
    assert ("closed", "b") not in handler.calls


def test_workers_continue_their_sessions_without_the_relay(server: Server, relay: NodeRelay, handler: Handler) -> None:
    workers = {name: Worker(server, relay, name) for name in "ab"}
    until(lambda: all(worker.client.welcomed for worker in workers.values()))
    workers["a"].say(1)
    relay.stop()
    send(server, "ab", Abort(5))
    workers["a"].say(2)
    until(lambda: [call for call in sorted(handler.calls) if call[0] == "returned"] == [
        ("returned", "a"), ("returned", "b")])
    until(lambda: handler.values == {"a": [1, 2]} and all(w.received == [Abort(5)] for w in workers.values()))
    assert not any(worker.ended.is_set() for worker in workers.values())


def test_a_worker_returns_to_a_relay_that_closed_its_connection_while_it_sent(server: Server, relay: NodeRelay,
                                                                              handler: Handler) -> None:
    """A message that cannot be sent because the connection is closed says nothing about the next connection."""
    reading, dropped = threading.Event(), threading.Event()

    def on_message(message: CoordinatorMessage) -> None:
        reading.set()
        dropped.wait(60)  # the reading thread does not notice meanwhile

    client = Client(server.address, Hello("a", "n", TOKEN), on_message, print, relay=relay.address, relay_seconds=60.0)
    until(lambda: client.welcomed)
    send(server, "a", Abort(1))
    assert reading.wait(60)
    relay._loop.call_soon_threadsafe(relay._drop_all)
    for value in range(5):
        client.send(WorkerEvent("said", {"value": value}, 0.0))
        time.sleep(0.05)
    dropped.set()
    until(lambda: handler.values == {"a": list(range(5))})
    time.sleep(0.5)
    assert [kind for kind, _ in handler.events] == []
    assert ("returned", "a") in handler.calls
    client.close()


def test_nothing_follows_a_line_that_a_relay_took_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows would be lost with the line, and the acknowledgement of a later message would hide that."""
    monkeypatch.setattr(Client, "_run", lambda self: None)  # the reading thread has not noticed yet
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(("127.0.0.1", 1), Hello("a", "n", TOKEN), print, print, relay=listener.getsockname()[:2],
                        relay_seconds=0.1)
        relay, _ = listener.accept()
        with relay:
            client.send(WorkerEvent("said", {"text": "x" * (64 << 20)}, 0.0))
            relay.setblocking(False)
            taken = b"".join(arrived(relay))
            assert not taken.endswith(b"\n")
            client.send(Beat(1, 1))
            client.send(WorkerEvent("said", {"value": 2}, 0.0))
            time.sleep(0.2)
            assert b"".join(arrived(relay)) == b""
        client.close()


def arrived(connection: socket.socket) -> Iterator[bytes]:
    """Yield what arrives on a non-blocking connection until nothing more does for a moment."""
    while select.select([connection], [], [], 0.2)[0] and (data := connection.recv(1 << 20)):
        yield data


def test_messages_arrive_once_although_the_relays_connection_is_reset(server: Server, handler: Handler) -> None:
    rng = random.Random(1)
    with network(server.address) as between:
        relay = NodeRelay("127.0.0.1", Endpoint(between.address, TOKEN), "n", lambda: None)
        relay.start()
        workers = {name: Worker(server, relay, name) for name in "abc"}
        until(lambda: all(worker.client.welcomed for worker in workers.values()))
        for value in range(60):
            for worker in workers.values():
                worker.say(value)
            send(server, "abc", Abort(value))
            if value % 20 == 10:
                between.reset()
                until(lambda: all(worker.client.connected.is_set() for worker in workers.values()))
            time.sleep(rng.uniform(0, 0.004))
        until(lambda: handler.values == {name: list(range(60)) for name in "abc"})
        until(lambda: all(len(worker.received) == 60 for worker in workers.values()))
        assert all(worker.received == [Abort(value) for value in range(60)] for worker in workers.values())
        assert not any(kind == "closed" for kind, _ in handler.calls)
        for worker in workers.values():
            worker.client.close()
        relay.stop()


def test_a_relay_ends_with_its_coordinator_and_so_do_its_workers(monkeypatch: pytest.MonkeyPatch,
                                                                 handler: Handler) -> None:
    monkeypatch.setattr("tidewheel.elastic.node_relay.REFUSED_SECONDS", 0.3)
    monkeypatch.setattr("tidewheel.elastic.client.REFUSED_SECONDS", 0.3)
    server = Server("127.0.0.1", TOKEN, handler)
    server.start()
    ended = threading.Event()
    relay = NodeRelay("127.0.0.1", Endpoint(server.address, TOKEN), "n", ended.set)
    relay.start()
    worker = Worker(server, relay, "a")
    until(lambda: worker.client.welcomed)
    server.stop()
    assert ended.wait(60)
    assert worker.ended.wait(60)


def test_a_worker_waits_for_the_coordinator_although_a_connection_to_it_broke_at_once() -> None:
    """Its hello would go nowhere, and the relay's signs of life would keep it waiting for the welcome."""
    relay = NodeRelay("127.0.0.1", Endpoint(("127.0.0.1", 1), TOKEN), "n", lambda: None)
    writer: Any = object()

    async def connect() -> list[int]:
        serving = asyncio.create_task(relay._serve(Hello("a", "n", ""), asyncio.StreamReader(), writer))
        await asyncio.sleep(0)
        relay._connected.set()
        relay._connected.clear()
        await asyncio.sleep(0.01)
        known = [len(relay._workers)]
        relay._connected.set()
        await asyncio.sleep(0.01)
        known.append(len(relay._workers))
        serving.cancel()
        return known

    assert asyncio.run(connect()) == [0, 1]


def test_a_relay_ends_at_a_line_that_it_cannot_pass_on(caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator would send it again on each new connection. The workers read it on their own ones."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = NodeRelay("127.0.0.1", Endpoint(listener.getsockname()[:2], TOKEN), "n", ended.set)
        relay.start()
        coordinator, _ = listener.accept()
        with coordinator:
            assert coordinator.recv(1 << 16)  # its greeting
            with contextlib.suppress(OSError):  # the relay hangs up
                coordinator.sendall(b"x" * (2 * MOST_BYTES) + b"\n")
            assert ended.wait(60)
    assert "connect to the coordinator directly: a line of" in caplog.text
    relay.stop()


def test_a_relay_whose_workers_are_told_to_end_closes_their_connections_and_ends(
        server: Server, handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    relay = NodeRelay("127.0.0.1", Endpoint(server.address, TOKEN), "n", lambda: None)
    relay.start()
    worker = Worker(server, relay, "a")
    until(lambda: worker.client.welcomed)
    with socket.create_connection(relay.address) as unauthenticated:
        relay.dismiss("another driver owns the run")
        unauthenticated.settimeout(60)
        assert unauthenticated.recv(1) == b""
    until(lambda: not relay.runs)
    assert worker.received == [TakenOver("another driver owns the run")]
    assert errors == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(relay.address)
    worker.client.close()


def test_a_peer_without_the_token_gets_no_session(server: Server, relay: NodeRelay, handler: Handler) -> None:
    worker = Worker(server, relay, "a", token="guess")
    assert worker.ended.wait(60)
    wrong = NodeRelay("127.0.0.1", Endpoint(server.address, "guess"), "n", lambda: None)
    wrong.start()
    other = Worker(server, wrong, "b", token="guess")
    assert other.ended.wait(60)
    wrong.stop()
    assert handler.calls == []


def test_frames_of_a_line_are_those_that_a_worker_gets_directly():
    messages: list[CoordinatorMessage] = [Abort(4), Stop(4, save=True), Raise('"number":[1]'),
                                          Join(9, ANY_RANK, 2, ("h", 1), TABLE, RunHistory())]
    orders = Orders()
    sent: dict[int, list[bytes]] = {}
    for number, message in enumerate(messages):
        frame = Outgoing(message, number)
        for worker in range(2):
            rank = worker if isinstance(message, Join) else ANY_RANK
            orders.add(worker, frame, rank)
            sent.setdefault(worker, []).append(encode(FromCoordinator(frame.message(rank), number)))
            assert frame.line(rank) == sent[worker][-1]
    got: dict[int, list[bytes]] = {}
    lines = orders.take().splitlines()
    for line in lines:
        body, values = split(line)
        for index, worker in enumerate(values["workers"]):
            rank = values["ranks"][index] if "ranks" in values else ANY_RANK
            got.setdefault(worker, []).append(frame_line(with_rank(body, rank), values["number"], values["received"]))
    assert got == sent
    assert len(lines) == len(messages)  # one for both workers


def test_order_of_each_worker_is_kept():
    rng = random.Random(2)
    for _ in range(200):
        groups = Groups()
        sent: dict[int, list[tuple[str, int]]] = {}
        for number in range(rng.randrange(1, 30)):
            worker, body = rng.randrange(4), rng.choice("xyz")
            groups.add(body, worker, number, 0)
            sent.setdefault(worker, []).append((body, number))
        got: dict[int, list[tuple[str, int]]] = {}
        for body, workers in groups.take():
            for worker, sequence, _ in workers:
                assert sequence is not None
                got.setdefault(worker, []).append((body, sequence))
        assert got == sent
