"""The retry policy decides how often a failing request is sent, and nested budgets do not multiply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.object_servers.az import AZServer
from tests.object_servers.base import ObjectServer
from tests.object_servers.gs import GSServer
from tidewheel import retry
from tidewheel.cluster.s3_faults import Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageAwayError
from tidewheel.retry import RetryPolicy, call
from tidewheel.storage import Store, store
from tidewheel.time_limit import TimeLimit

POLICY = RetryPolicy(request_seconds=60.0, budget_seconds=3.5, pause_seconds=1.0, longest_pause_seconds=1.0)
"""A budget that allows four tries with pauses of one second: at 0, 1, 2 and 3 s."""
TRIES = 4
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "write": lambda remote: remote.write("key", b"data"), "create": lambda remote: remote.create("key", b"data"),
    "read": lambda remote: remote.read("key", 0, 2), "size": lambda remote: remote.size("key"),
    "list": lambda remote: remote.list(), "delete": lambda remote: remote.delete("key"),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the simulated clock of `call`, whose pauses take no real time."""
    now = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def pause(self: TimeLimit, seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(retry, "time", Clock)
    monkeypatch.setattr(retry.JITTER, "random", lambda: 1.0)
    monkeypatch.setattr(TimeLimit, "pause", pause)
    return now


# -- one failing request -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server(faults=Faults(0.0)) as running:
        yield running


@pytest.mark.parametrize("fault", ["internal_error", "slow_down", "reset_before"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failing_s3_request_is_sent_as_often_as_the_policy_says(s3: S3Server, clock: list[float], name: str,
                                                                 fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither botocore nor s3fs nor aiohttp adds tries of its own."""
    monkeypatch.setattr(retry, "POLICY", POLICY)
    remote = store(s3.create_bucket("tries"))
    remote.write("key", b"data")
    remote.read("key")  # opens a connection that is kept: aiohttp sends a request again when a kept one is closed
    s3.fail(Faults(1.0, 0, (fault,)))
    before = s3.fault_counts()["requests"]
    with pytest.raises(StorageAwayError, match=rf"{TRIES} tries in 3 s"):
        OPERATIONS[name](remote)
    assert s3.fault_counts()["requests"] - before == TRIES
    s3.fail(Faults(0.0))


@pytest.mark.parametrize("fault", ["internal_error", "slow_down", "reset_before", "reset_after"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("kind", "package"), [(GSServer, "gcsfs"), (AZServer, "adlfs")])
def test_a_failing_request_is_sent_as_often_as_the_policy_says(kind: type[ObjectServer], package: str, name: str,
                                                               fault: str, clock: list[float],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gcsfs nor the Azure SDK nor aiohttp adds tries of its own."""
    pytest.importorskip(package)
    monkeypatch.setattr(retry, "POLICY", POLICY)
    with kind() as server:
        remote = store(server.create_bucket("tries"))
        remote.write("key", b"data")
        remote.read("key")
        server.faults = Faults(1.0, 0, (fault,))
        before = len(server.requests)
        with pytest.raises(StorageAwayError, match=rf"{TRIES} tries in 3 s"):
            OPERATIONS[name](remote)
        assert len(server.requests) - before == TRIES, server.requests[before:]


# -- call ----------------------------------------------------------------------------------------


def failing(tries: list[int], succeed_at: int = 1 << 30) -> Callable[[], str]:
    def attempt() -> str:
        tries.append(1)
        if len(tries) >= succeed_at:
            return "done"
        raise ConnectionError("reset")

    return attempt


def test_tries_end_with_the_budget_and_the_last_error_says_how_many(clock: list[float]) -> None:
    tries: list[int] = []
    with pytest.raises(ConnectionError) as error:
        call(failing(tries), POLICY, may_help=lambda _: True)
    assert len(tries) == TRIES
    assert error.value.__notes__ == ["4 tries in 3 s"]


def test_the_first_success_ends_the_tries(clock: list[float]) -> None:
    tries: list[int] = []
    assert call(failing(tries, 3), POLICY, may_help=lambda _: True) == "done"
    assert len(tries) == 3


def test_an_error_that_no_retry_can_fix_is_raised_at_once(clock: list[float]) -> None:
    tries: list[int] = []
    with pytest.raises(ConnectionError):
        call(failing(tries), POLICY, may_help=lambda _: False)
    assert len(tries) == 1


def test_nested_calls_share_one_budget(clock: list[float]) -> None:
    """Three levels have the same policy: without sharing there would be 4 * 4 * 4 tries."""
    tries: list[int] = []
    retried: list[Exception] = []

    def inner() -> str:
        return call(failing(tries), POLICY, may_help=lambda _: True)

    def middle() -> str:
        return call(inner, POLICY, may_help=lambda _: True)

    with pytest.raises(ConnectionError):
        call(middle, POLICY, may_help=lambda _: True, on_retry=retried.append)
    assert len(tries) == TRIES
    assert len(retried) == TRIES - 1  # the outermost call is notified of retries at every level
    assert not retry.is_nested()


def test_an_inner_call_may_use_the_outer_budget_to_its_end(clock: list[float]) -> None:
    tries: list[int] = []
    longer = RetryPolicy(budget_seconds=10.5, pause_seconds=1.0, longest_pause_seconds=1.0)
    with pytest.raises(ConnectionError):
        call(lambda: call(failing(tries), POLICY, may_help=lambda _: True), longer, may_help=lambda _: True)
    assert len(tries) == 11


def test_retries_are_logged_and_the_third_as_a_warning(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, retry.logger.name), pytest.raises(ConnectionError):
        call(failing([]), POLICY, may_help=lambda _: True)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert "try 1 failed" in caplog.text
