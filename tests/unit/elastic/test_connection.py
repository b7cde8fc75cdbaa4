"""The connection between coordinator and workers, over a network that fails."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.elastic.network import TOKEN, Network, network
from tidewheel.elastic import client, connection, sessions
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import DeliveryLog
from tidewheel.elastic.messages import Beat, Hello, Stop, WorkerEvent, WorkerMessage
from tidewheel.elastic.server import Server


class Handler(sessions.Handler):
    """A recorder of the calls that a server makes to its handler."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.values: list[int] = []

    def opened(self, hello: Hello) -> None:
        self.calls.append(("opened", hello.name))

    def received(self, name: str, message: WorkerMessage) -> None:
        if isinstance(message, WorkerEvent):
            self.values.append(message.detail["value"])

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

    def __init__(self, address: tuple[str, int], **options: Any) -> None:
        self.received: list[int] = []
        self.ended = threading.Event()
        hello = Hello("a", "n", options.pop("token", TOKEN))
        self.client = Client(address, hello, lambda message: self.received.append(message.generation),
                             self.ended.set, **options)

    def say(self, value: int) -> None:
        self.client.send(WorkerEvent("said", {"value": value}, 0.0))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def proxy(server: Server) -> Iterator[Network]:
    with network(server.address) as running:
        yield running


def test_no_message_is_lost_or_received_twice_however_often_the_connection_breaks(server, handler, proxy):
    worker = Worker(proxy.address)
    generator = random.Random(3)
    count = 1500
    until(lambda: worker.client.welcomed)

    def break_off() -> None:
        while len(handler.values) < count or len(worker.received) < count:
            time.sleep(generator.random() * 0.1)
            proxy.reset()

    def say() -> None:
        for value in range(count):
            worker.say(value)
            worker.client.send(Beat(0, 0))
            time.sleep(0.0005)

    breaking = threading.Thread(target=break_off)
    saying = threading.Thread(target=say)
    breaking.start()
    saying.start()
    for value in range(count):
        server.call(lambda value=value: server.send("a", Stop(value)))
        time.sleep(0.0005)
    saying.join()
    until(lambda: len(handler.values) >= count and len(worker.received) >= count)
    breaking.join()
    assert handler.values == list(range(count))
    assert worker.received == list(range(count))
    assert handler.calls.count(("returned", "a")) > 3
    assert ("closed", "a") not in handler.calls
    assert not worker.ended.is_set()
    worker.client.send(Beat(0, 0))
    until(lambda: not server.call(lambda: len(server._sessions["a"].log.pending)))
    assert len(worker.client._log.pending) < connection.ACKNOWLEDGED
    worker.client.close()
    until(lambda: handler.calls[-1] == ("closed", "a"))


def test_a_network_that_is_away_for_a_while_costs_no_worker(server, handler, proxy, monkeypatch):
    tries: list[float] = []
    connect = Client._connect

    def counted(client: Client, seconds: float) -> socket.socket:
        tries.append(seconds)
        return connect(client, seconds)

    monkeypatch.setattr(Client, "_connect", counted)
    worker = Worker(proxy.address)
    until(lambda: worker.client.welcomed)
    proxy.away()
    until(lambda: not worker.client.connected.is_set())
    worker.say(1)
    server.call(lambda: server.send("a", Stop(2)))
    until(lambda: len(tries) == 2)  # it connects again, and nothing answers
    assert handler.calls == [("opened", "a")]
    proxy.back()
    until(lambda: handler.values == [1] and worker.received == [2])
    assert worker.client.connected.is_set()
    assert handler.calls == [("opened", "a"), ("returned", "a")]
    worker.client.close()


def test_a_worker_that_was_cut_off_ends_when_it_returns(server, handler, proxy):
    worker = Worker(proxy.address)
    until(lambda: worker.client.welcomed)
    proxy.away()
    until(lambda: not worker.client.connected.is_set())
    server.call(lambda: server.cut("a"))
    worker.say(1)
    assert not worker.ended.is_set()
    proxy.back()
    assert worker.ended.wait(60)
    assert handler.values == []
    assert handler.calls == [("opened", "a")]


def test_a_worker_ends_when_a_successor_has_its_name(server, handler, proxy):
    """Ray starts the function again in a kept process while the old connection is still reconnecting."""
    worker = Worker(proxy.address)
    until(lambda: worker.client.welcomed)
    proxy.away()
    until(lambda: not worker.client.connected.is_set())
    second = Worker(server.address)
    until(lambda: handler.calls.count(("opened", "a")) == 2)
    proxy.back()
    assert worker.ended.wait(60)
    second.say(7)
    until(lambda: handler.values == [7])
    second.client.close()


def test_a_worker_ends_when_the_coordinators_process_is_gone(server):
    worker = Worker(server.address)
    until(lambda: worker.client.welcomed)
    server.stop()
    assert worker.ended.wait(client.REFUSED_SECONDS + 30)


def test_both_sides_give_up_after_the_time_to_reconnect(server, handler, proxy):
    worker = Worker(proxy.address, reconnect_seconds=1.0)
    until(lambda: worker.client.welcomed)
    proxy.away()
    assert worker.ended.wait(60)
    assert handler.calls == [("opened", "a")]  # the server does not report silence: the membership detects it
    proxy.close()
    until(lambda: handler.calls == [("opened", "a"), ("closed", "a")])


def test_the_death_of_a_process_is_noticed_at_once(server, handler):
    worker = Worker(server.address)
    until(lambda: ("opened", "a") in handler.calls)
    worker.client._socket.shutdown(socket.SHUT_WR)  # what the kernel does when a process dies
    until(lambda: ("closed", "a") in handler.calls)
    assert worker.ended.wait(60), "the worker reconnected although it was given up"


def test_an_unauthenticated_peer_does_not_come_back(server, handler):
    worker = Worker(server.address, token="guessed")
    assert worker.ended.wait(60)
    assert handler.calls == []


def test_acknowledged_messages_are_forgotten():
    log: DeliveryLog[str] = DeliveryLog()
    for message in "abcde":
        log.add(message)
    log.acknowledge(3)
    assert list(log.pending) == [(4, "d"), (5, "e")]
    assert log.is_new(1)
    assert not log.is_new(1)
    assert log.is_new(None)


def test_lines_come_out_as_they_went_in_however_they_are_cut():
    lines = [bytes([97 + number % 26]) * random.Random(number).randrange(200_000) for number in range(40)]
    here, there = socket.socketpair()

    def send() -> None:
        rng, data = random.Random(1), b"".join(line + b"\n" for line in lines)
        while data:
            size = rng.choice([1, 7, 1000, 100_000])
            there.sendall(data[:size])
            data = data[size:]
        there.close()

    thread = threading.Thread(target=send)
    thread.start()
    with here:
        assert list(connection.lines_of(here, None)) == lines
    thread.join()


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "MOST_BYTES_TO_WORKER", 1000)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"a\n" + b"b" * 900 + b"\n" + b"c" * 1001)
        received = connection.lines_of(here, None)
        assert [next(received), next(received)] == [b"a", b"b" * 900]
        with pytest.raises(ConnectionError, match="a line of more than 1000 bytes"):
            next(received)
