"""The connection between coordinator and workers, over a network that fails."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.elastic.network import Network, network
from tidewheel.elastic import client, connection
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import DeliveryLog
from tidewheel.elastic.messages import Beat, Hello, Stop, WorkerEvent, WorkerMessage
from tidewheel.elastic.server import Server

pytestmark = pytest.mark.timeout(120)
TOKEN = "secret"


class Heard:
    """What a server tells its handler."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.numbers: list[int] = []

    def opened(self, hello: Hello) -> None:
        self.calls.append(("opened", hello.name))

    def received(self, name: str, message: WorkerMessage) -> None:
        if isinstance(message, WorkerEvent):
            self.numbers.append(message.detail["number"])

    def returned(self, name: str, seconds: float) -> None:
        self.calls.append(("returned", name))

    def closed(self, name: str) -> None:
        self.calls.append(("closed", name))

    def tick(self) -> None:
        return

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        self.calls.append((kind, detail["error"]))


class Worker:
    """A client that remembers what it was told."""

    def __init__(self, address: tuple[str, int], **options: Any) -> None:
        self.told: list[int] = []
        self.ended = threading.Event()
        hello = Hello("a", "n", options.pop("token", TOKEN))
        self.client = Client(address, hello, lambda message: self.told.append(message.generation), self.ended.set,
                             **options)

    def say(self, number: int) -> None:
        self.client.send(WorkerEvent("said", {"number": number}, 0.0))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def server(heard: Heard) -> Iterator[Server]:
    made = Server("127.0.0.1", TOKEN, heard)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def between(server: Server) -> Iterator[Network]:
    with network(server.address) as made:
        yield made


def test_nothing_is_lost_or_heard_twice_however_often_the_connection_breaks(server, heard, between):
    worker, generator, count = Worker(between.address), random.Random(3), 1500
    until(lambda: worker.client.welcomed)  # it is welcome

    def break_off() -> None:
        while len(heard.numbers) < count or len(worker.told) < count:
            time.sleep(generator.random() * 0.1)
            between.reset()

    def say() -> None:
        for number in range(count):
            worker.say(number)
            worker.client.send(Beat(0, 0))
            time.sleep(0.0005)

    breaking, saying = threading.Thread(target=break_off), threading.Thread(target=say)
    breaking.start()
    saying.start()
    for number in range(count):
        server.call(lambda number=number: server.send("a", Stop(number)))
        time.sleep(0.0005)
    saying.join()
    until(lambda: len(heard.numbers) >= count and len(worker.told) >= count)
    breaking.join()
    assert heard.numbers == list(range(count))
    assert worker.told == list(range(count))
    assert heard.calls.count(("returned", "a")) > 3
    assert ("closed", "a") not in heard.calls
    assert not worker.ended.is_set()
    worker.client.send(Beat(0, 0))
    until(lambda: not server.call(lambda: len(server._sessions["a"].log.pending)))
    assert len(worker.client._log.pending) < connection.ACKNOWLEDGED
    worker.client.close()
    until(lambda: heard.calls[-1] == ("closed", "a"))


def test_a_network_that_is_away_for_a_while_costs_no_worker(server, heard, between):
    worker = Worker(between.address)
    until(lambda: worker.client.welcomed)  # it is welcome
    between.away()
    until(lambda: not worker.client.connected.is_set())
    worker.say(1)
    server.call(lambda: server.send("a", Stop(2)))
    time.sleep(2.5)  # more than the first attempts
    assert heard.calls == [("opened", "a")]
    between.back()
    until(lambda: heard.numbers == [1] and worker.told == [2])
    assert worker.client.connected.is_set()
    assert heard.calls == [("opened", "a"), ("returned", "a")]
    worker.client.close()


def test_a_worker_that_was_cut_off_ends_when_it_returns(server, heard, between):
    worker = Worker(between.address)
    until(lambda: worker.client.welcomed)  # it is welcome
    between.away()
    until(lambda: not worker.client.connected.is_set())
    server.call(lambda: server.cut("a"))
    worker.say(1)
    assert not worker.ended.is_set()
    between.back()
    assert worker.ended.wait(20)
    assert heard.numbers == []
    assert heard.calls == [("opened", "a")]


def test_a_worker_ends_when_a_successor_has_its_name(server, heard, between):
    """Ray starts the function in a kept process again while its old connection is being made anew."""
    worker = Worker(between.address)
    until(lambda: worker.client.welcomed)  # it is welcome
    between.away()
    until(lambda: not worker.client.connected.is_set())
    second = Worker(server.address)
    until(lambda: heard.calls.count(("opened", "a")) == 2)
    between.back()
    assert worker.ended.wait(20)
    second.say(7)
    until(lambda: heard.numbers == [7])
    second.client.close()


def test_a_worker_ends_when_the_coordinators_process_is_gone(server):
    worker = Worker(server.address)
    until(lambda: worker.client.welcomed)
    server.stop()
    assert worker.ended.wait(client.REFUSED_SECONDS + 30)


def test_both_sides_give_up_after_the_time_to_reconnect(server, heard, between):
    worker = Worker(between.address, reconnect_seconds=1.0)
    until(lambda: worker.client.welcomed)  # it is welcome
    between.away()
    assert worker.ended.wait(30)
    assert heard.calls == [("opened", "a")]  # it has heard nothing of that: silence is found by the membership
    between.close()
    until(lambda: heard.calls == [("opened", "a"), ("closed", "a")])


def test_the_death_of_a_process_is_noticed_at_once(server, heard):
    worker = Worker(server.address)
    until(lambda: ("opened", "a") in heard.calls)
    worker.client._socket.shutdown(socket.SHUT_WR)  # what the kernel does for it
    until(lambda: ("closed", "a") in heard.calls)
    assert worker.ended.wait(20), "it came back although it was given up"


def test_an_unauthenticated_peer_does_not_come_back(server, heard):
    worker = Worker(server.address, token="guessed")
    assert worker.ended.wait(10)
    assert heard.calls == []


def test_acknowledged_messages_are_forgotten():
    log: DeliveryLog[str] = DeliveryLog()
    for message in "abcde":
        log.add(message)
    log.acknowledge(3)
    assert list(log.pending) == [(4, "d"), (5, "e")]
    assert log.is_new(1)
    assert not log.is_new(1)
    assert log.is_new(None)
