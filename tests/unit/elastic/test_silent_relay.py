"""Relays that accept connections and say nothing, in processes that are stopped, woken up and killed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.unit.elastic.network import TOKEN
from tests.unit.elastic.relay_process import RelayProcess, relay_process
from tests.unit.elastic.test_connection import until
from tests.unit.elastic.test_node_relay import Handler, Worker, send
from tidewheel.elastic.messages import Abort, WorkerEvent
from tidewheel.elastic.server import Server

RELAY_SECONDS = 1.0


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def relay(server: Server) -> Iterator[RelayProcess]:
    with relay_process(server.address, TOKEN) as running:
        yield running


def exchange(server: Server, handler: Handler, workers: dict[str, Worker], start: int, count: int) -> None:
    """Let coordinator and workers send each other `count` messages, and wait until all have arrived once, in order."""
    until(lambda: all(worker.client.welcomed for worker in workers.values()))
    for value in range(start, start + count):
        send(server, "".join(workers), Abort(value))
        for worker in workers.values():
            worker.say(value)
    expected = list(range(start + count))
    until(lambda: all(handler.values.get(name, [])[-1:] == expected[-1:] for name in workers))
    until(lambda: all(worker.received[-1:] == [Abort(expected[-1])] for worker in workers.values()))
    assert {name: handler.values[name] for name in workers} == dict.fromkeys(workers, expected)
    assert all(worker.received == [Abort(value) for value in expected] for worker in workers.values())


def reasons(handler: Handler) -> dict[str, str]:
    """Return why each worker has left its relay."""
    return {detail["worker"]: detail["reason"] for kind, detail in handler.events if kind == "relay_left"}


def close(*workers: Worker) -> None:
    for worker in workers:
        worker.client.close()


def test_a_relay_that_is_frozen_before_the_welcome_is_left(server: Server, relay: RelayProcess,
                                                           handler: Handler) -> None:
    relay.freeze()
    workers = {name: Worker(server, relay, name, relay_seconds=RELAY_SECONDS) for name in "ab"}
    exchange(server, handler, workers, 0, 3)
    until(lambda: reasons(handler) == dict.fromkeys("ab", "it was silent for 1 s"))
    relay.wake()  # it passes on the hellos of both now, for connections that are closed
    last = Worker(server, relay, "c", relay_seconds=60)
    until(lambda: last.client.welcomed)
    exchange(server, handler, workers, 3, 3)
    assert sorted(call for call in handler.calls if call[0] == "opened") == [("opened", name) for name in "abc"]
    assert not any(kind == "closed" for kind, _ in handler.calls)
    close(*workers.values(), last)


def test_a_relay_that_is_frozen_during_the_run_is_left_and_may_wake_up(server: Server, relay: RelayProcess,
                                                                       handler: Handler) -> None:
    workers = {name: Worker(server, relay, name, relay_seconds=RELAY_SECONDS) for name in "ab"}
    exchange(server, handler, workers, 0, 3)
    relay.freeze()
    exchange(server, handler, workers, 3, 3)
    assert reasons(handler).keys() == set("ab")
    relay.wake()  # it still has what the workers sent it last, and their closed connections
    last = Worker(server, relay, "c", relay_seconds=60)
    until(lambda: last.client.welcomed)
    exchange(server, handler, workers, 6, 3)
    assert sorted(call for call in handler.calls if call[0] == "opened") == [("opened", name) for name in "abc"]
    assert not any(kind == "closed" for kind, _ in handler.calls)
    close(*workers.values(), last)


def test_a_relay_that_is_frozen_holds_up_no_message_however_many_there_are(server: Server, relay: RelayProcess,
                                                                           handler: Handler) -> None:
    worker = Worker(server, relay, "a", relay_seconds=RELAY_SECONDS)
    until(lambda: worker.client.welcomed)
    relay.freeze()
    for value in range(100):  # 20 MB, more than the kernel keeps for the relay
        worker.client.send(WorkerEvent("said", {"value": value, "text": "x" * 200_000}, 0.0))
    until(lambda: len(handler.values.get("a", [])) == 100)
    assert handler.values["a"] == list(range(100))
    close(worker)


def test_a_relay_that_is_killed_is_left(server: Server, relay: RelayProcess, handler: Handler,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.elastic.node_connection.RESET_SECONDS", 60.0)  # on a busy machine
    workers = {name: Worker(server, relay, name, relay_seconds=60) for name in "ab"}
    exchange(server, handler, workers, 0, 3)
    relay.kill()
    exchange(server, handler, workers, 3, 3)
    assert reasons(handler).keys() == set("ab")
    assert not any(kind == "closed" for kind, _ in handler.calls)
    close(*workers.values())


def test_a_worker_ends_when_its_process_ends_although_its_relay_was_left(server: Server, relay: RelayProcess,
                                                                         handler: Handler) -> None:
    relay.freeze()
    worker = Worker(server, relay, "a", relay_seconds=RELAY_SECONDS)
    until(lambda: worker.client.welcomed)
    worker.client.close()
    until(lambda: ("closed", "a") in handler.calls)
    relay.wake()  # its hello comes late: the process does not open again
    last = Worker(server, relay, "b", relay_seconds=60)
    until(lambda: last.client.welcomed)
    assert handler.calls.count(("opened", "a")) == 1
    close(last)


def test_no_message_is_lost_however_the_relay_stands_still(server: Server, relay: RelayProcess,
                                                           handler: Handler) -> None:
    rng = random.Random(5)
    workers: dict[str, Worker] = {}
    for name in "abcdef":
        workers[name] = Worker(server, relay, name, relay_seconds=0.2)
        until(lambda: workers[name].client.welcomed)  # noqa: B023
        relay.freeze()
        for value in range(10):
            workers[name].say(value)
            send(server, name, Abort(value))
            time.sleep(rng.uniform(0.0, 0.06))
            if rng.random() < 0.4:
                relay.wake()
                time.sleep(rng.uniform(0.0, 0.06))
                relay.freeze()
        relay.wake()
    exchange(server, handler, workers, 10, 3)
    assert sorted(call for call in handler.calls if call[0] == "opened") == [("opened", name) for name in "abcdef"]
    assert not any(kind == "closed" for kind, _ in handler.calls)
    close(*workers.values())
