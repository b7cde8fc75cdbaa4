"""Workers whose coordinator stands still, while another driver takes their run over."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.elastic.machines import coordinator_of, workers_of
from tests.unit.elastic.network import TOKEN
from tests.unit.elastic.test_connection import Handler, Worker, until
from tidewheel.commit_log import CommitLog
from tidewheel.elastic import connection, owner_watch
from tidewheel.elastic.agents import CurrentRelay
from tidewheel.elastic.client import Client
from tidewheel.elastic.connection import Endpoint
from tidewheel.elastic.member import EXIT_CODE
from tidewheel.elastic.messages import Beat, CoordinatorMessage, Hello, TakenOver
from tidewheel.elastic.node_relay import NodeRelay
from tidewheel.elastic.owner_watch import OwnerWatch
from tidewheel.elastic.server import Server
from tidewheel.errors import OwnershipError, StorageAwayError
from tidewheel.ownership import acquire
from tidewheel.storage import store


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic times at which this process has read the commit log since the fixture began."""
    times: list[float] = []
    head = CommitLog.head

    def seen_head(log: CommitLog) -> Any:
        times.append(time.monotonic())
        return head(log)

    monkeypatch.setattr(CommitLog, "head", seen_head)
    return times


# -- with a coordinator that is frozen -----------------------------------------------------------------
def test_workers_of_a_frozen_coordinator_end_when_another_driver_owns_the_run(tmp_path: Path) -> None:
    with coordinator_of(tmp_path, 2) as (coordinator, endpoint), workers_of(endpoint, "ab") as workers:
        coordinator.freeze()
        acquire(store(tmp_path), force=True)
        assert [worker.process.wait(timeout=120) for worker in workers] == [EXIT_CODE, EXIT_CODE]
        assert [worker.line() for worker in workers] == ["asked", "asked"]


def test_workers_of_a_frozen_coordinator_that_owns_the_run_wait_for_it(tmp_path: Path) -> None:
    with coordinator_of(tmp_path, 2) as (coordinator, endpoint), workers_of(endpoint, "ab") as workers:
        coordinator.freeze()
        for worker in workers:
            assert [worker.line() for _ in range(3)] == ["asked"] * 3
        coordinator.wake()
        for worker in workers:
            worker.finish()
        assert [worker.process.wait(timeout=120) for worker in workers] == [0, 0]


def test_a_relay_asks_once_for_all_workers_of_its_node(tmp_path: Path, questions: list[float]) -> None:
    with coordinator_of(tmp_path, 3) as (coordinator, endpoint):
        relay = NodeRelay("127.0.0.1", endpoint, "n", lambda: None)
        relay.start()
        received: dict[str, list[CoordinatorMessage]] = {name: [] for name in "abc"}
        clients = [Client(endpoint.address, Hello(name, "n", endpoint.token), received[name].append, lambda: None,
                          relay=relay.address, relay_seconds=60.0) for name in "abc"]
        until(lambda: all(client.welcomed for client in clients))
        coordinator.freeze()
        acquire(store(tmp_path), force=True)
        questions.clear()

        def are_told() -> bool:
            for client in clients:
                client.send(Beat(-1, 0))
            return all(messages and isinstance(messages[-1], TakenOver) for messages in received.values())

        until(are_told)
        assert len(questions) == 1
        until(lambda: not relay.runs)
        for client in clients:
            client.close()


# -- what counts as an answer --------------------------------------------------------------------------
def test_the_coordinator_answers_a_worker_that_gets_no_orders(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.05)
    worker = Worker(server.address)
    for _ in range(3):
        worker.client.send(Beat(-1, 0))

        def is_answered() -> bool:
            answered = worker.client.unanswered == 0.0
            worker.client.send(Beat(-1, 0))
            return answered

        until(is_answered)
    assert worker.received == []
    worker.client.close()


def test_the_coordinator_answers_seldom(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 3600.0)
    worker = Worker(server.address)
    until(lambda: worker.client.welcomed)
    for value in range(10):
        worker.client.send(Beat(-1, value))
    worker.say(1)
    session = server.call(lambda: server._sessions["a"])
    until(lambda: session.log.received == 1)  # all ten heartbeats came before
    assert session.answered_at > time.monotonic() - 3600.0
    first = session.answered_at
    worker.say(2)
    until(lambda: session.log.received == 2)
    assert session.answered_at == first
    worker.client.close()


def test_messages_to_a_process_that_reads_nothing_are_unanswered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(listener.getsockname(), Hello("a", "n", TOKEN), lambda _: None, lambda: None)
        assert client.unanswered == 0.0
        client.send(Beat(-1, 0))
        first = client.unanswered
        client.send(Beat(-1, 0))
        assert client.unanswered > first > 0.0  # since the first message, not the last
        client.close()


def test_a_run_of_many_workers_is_answered_and_asks_seldom() -> None:
    assert connection.answer_seconds(16_384) == 8.0
    alone = OwnerWatch(Endpoint(("h", 1), "t", workers=16_384), lambda: 0.0, print)
    assert 16_384 / alone._spread() == pytest.approx(owner_watch.QUESTIONS_A_SECOND)
    relay = OwnerWatch(Endpoint(("h", 1), "t", workers=16_384), lambda: 0.0, print, represented=lambda: 8)
    assert 16_384 / 8 / relay._spread() == pytest.approx(owner_watch.QUESTIONS_A_SECOND)


# -- what storage says -----------------------------------------------------------------------------------
class Watched:
    """A watch of a worker of epoch 1 that looks all the time, and of which the test says how long it waits."""

    def __init__(self, run: Path, seconds: float) -> None:
        self.seconds = seconds
        self.looks = 0
        self.reasons: list[str] = []
        self.ended = threading.Event()
        self.watch = OwnerWatch(Endpoint(("h", 1), "t", run=str(run), epoch=1), self._unanswered, self._end)

    def _unanswered(self) -> float:
        self.looks += 1
        return self.seconds

    def _end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(owner_watch, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(owner_watch, "AGAIN_SECONDS", 0.001)
    one = Watched(tmp_path, owner_watch.SILENT_SECONDS - 0.1)
    yield one
    one.watch.close()


def test_storage_is_not_asked_while_the_coordinator_answers(watched: Watched, tmp_path: Path,
                                                            questions: list[float]) -> None:
    for _ in range(3):
        acquire(store(tmp_path), force=True)
    questions.clear()
    until(lambda: watched.looks >= 100)
    assert questions == []
    watched.seconds = owner_watch.SILENT_SECONDS
    assert watched.ended.wait(60)
    assert len(questions) == 1
    assert "the run was taken over by" in watched.reasons[0]
    assert "(epoch 2)" in watched.reasons[0]


def test_only_a_newer_epoch_ends_a_worker(watched: Watched, tmp_path: Path, questions: list[float]) -> None:
    watched.seconds = owner_watch.SILENT_SECONDS
    for _ in range(3):  # no log, then epoch 0, which is older than the worker's, then the worker's own
        until(lambda: len(questions) >= 3)
        acquire(store(tmp_path), force=True)
        questions.clear()
    assert watched.ended.wait(60)
    assert "(epoch 2)" in watched.reasons[0]


def test_storage_that_does_not_answer_ends_no_worker(watched: Watched, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        acquire(store(tmp_path), force=True)
    failures: list[int] = []
    head = CommitLog.head

    def fails_twice(log: CommitLog) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise StorageAwayError("the store does not answer", where="here", fix="wait")
        return head(log)

    monkeypatch.setattr(CommitLog, "head", fails_twice)
    watched.seconds = owner_watch.SILENT_SECONDS
    assert watched.ended.wait(60)
    assert len(failures) == 2


# -- relays of one node, one coordinator after the other -------------------------------------------------
def test_the_relay_of_a_newer_epoch_ends_the_workers_of_the_older(server: Server) -> None:
    relay = CurrentRelay("127.0.0.1", "n")
    address = relay.to(Endpoint(server.address, TOKEN, epoch=1))
    received: list[CoordinatorMessage] = []
    client = Client(server.address, Hello("a", "n", TOKEN), received.append, lambda: None, relay=address,
                    relay_seconds=60.0)
    until(lambda: client.welcomed)
    assert relay.to(Endpoint(server.address, TOKEN, epoch=1)) == address
    newer = Endpoint(("127.0.0.1", 9), TOKEN, epoch=2)
    address = relay.to(newer)
    until(lambda: received == [TakenOver("the run was taken over (epoch 2)")])
    with pytest.raises(OwnershipError, match="a relay of epoch 2"):
        relay.to(Endpoint(server.address, TOKEN, epoch=1))
    assert relay.to(newer) == address
    client.close()
