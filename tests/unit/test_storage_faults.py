"""Misbehaving stores: short faults are outlasted, others are reported with their cause, and nothing waits for ever."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tidewheel import retry
from tidewheel.cluster.s3_faults import ELSEWHERE, KINDS, Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.retry import RetryPolicy
from tidewheel.storage import Store, content_hash, store
from tidewheel.stores.objects import requests, s3_errors, streams
from tidewheel.stores.objects import store as object_store
from tidewheel.stores.objects.service import SilentError
from tidewheel.stores.s3 import S3Service, S3Store
from tidewheel.time_limit import TimeLimit, bounded

SHORT = RetryPolicy(request_seconds=0.5, budget_seconds=2.0)
"""Retry policy for stores that never answer."""
PATIENT = RetryPolicy(request_seconds=60.0, budget_seconds=0.5)
"""Retry policy for stores that answer, with a request limit that even a busy machine meets."""
LONG_SECONDS = 60.0
"""Longer than any step of these tests takes on a busy machine, unless it hangs."""
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "check": lambda target: target.check(),
    "write": lambda target: target.write("key", b"data"),
    "write parts": lambda target: target.write("key", bytes(40 << 20)),
    "create": lambda target: target.create("key", b"data"),
    "read": lambda target: target.read("key"),
    "size": lambda target: target.size("key"),
    "list": lambda target: target.list(),
    "delete": lambda target: target.delete("key"),
}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Yield the connections of a server that accepts them and never answers."""
    accepted: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=500)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)

    threading.Thread(target=accept, daemon=True).start()
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
                        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
                        "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield accepted
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in accepted:
        connection.close()


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    """Yield one server for the tests that choose the faults themselves; see `server`."""
    with S3Server(faults=Faults(0.0)) as started:
        yield started


@pytest.fixture
def server(running: S3Server) -> Iterator[S3Server]:
    """Return a server that has no faults until the test calls `fail`."""
    yield running
    running.fail(Faults(0.0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the simulated clock of `send`, whose pauses take no real time."""
    now = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def pause(self: TimeLimit, seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(retry, "time", Clock)
    monkeypatch.setattr(retry.time_limit.TimeLimit, "pause", pause)
    return now


# -- faults that are outlasted -----------------------------------------------------------------------------------


def test_all_kinds_of_faults_are_outlasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 5 << 20)  # a multipart upload of three parts
    monkeypatch.setattr(object_store, "READ_BYTES", 4 << 20)  # and as many requests to read it
    generator = random.Random(0)
    with S3Server(faults=Faults(0.2, 1)) as server:
        target = store(server.create_bucket("faulty") + "/data")
        written = {f"k{index}": generator.randbytes(10 ** generator.randint(0, 5)) for index in range(12)}
        written["long"] = generator.randbytes(11 << 20)
        stamps = [target.write(key, data) for key, data in written.items()]
        for stamp in stamps:
            data = written[stamp.key]
            assert target.read(stamp.key) == data
            assert target.read(stamp.key, 3, 50) == data[3:53]
            assert target.read(stamp.key, 0, 1 << 30) == data
            assert target.verify(stamp) == ""
            with target.open(stamp.key) as stream:
                stream.seek(len(data) // 2)
                assert content_hash(stream.read()) == content_hash(data[len(data) // 2:])
        assert [entry.key for entry in target.list()] == sorted(written)
        with pytest.raises(FileNotFoundError):
            target.read("nothing")
        for key in written:
            target.delete(key)
        assert target.list() == []
        counts = server.fault_counts()
    assert all(counts[kind] > 0 for kind in KINDS), counts


def test_a_few_silent_requests_are_outlasted() -> None:
    with S3Server(faults=Faults(0.3, 2, ("silent",))) as server:  # the fourth request below
        bucket = server.create_bucket("nap")
        target = S3Store(bucket, RetryPolicy(request_seconds=3.0, budget_seconds=60.0))
        for index in range(4):
            target.write(f"k{index}", b"data")
        assert len(target.list()) == 4
        assert server.fault_counts()["silent"] > 0


def test_an_upload_completed_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the completion is lost: the second try finds the object and no upload."""
    monkeypatch.setattr(streams, "PART_BYTES", 5 << 20)
    with S3Server() as server:
        target = store(server.create_bucket("twice"))
        original = S3Store.ask

        def twice(self, operation, *arguments, **options):
            if operation == "complete":
                original(self, operation, *arguments, **options)
            return original(self, operation, *arguments, **options)

        monkeypatch.setattr(S3Store, "ask", twice)
        data = bytes(11 << 20)
        assert target.verify(target.write("long", data)) == ""


def test_an_object_is_created_once_even_if_answers_are_lost() -> None:
    """The second try finds the object that the first one created, and recognises it as its own."""
    with S3Server(faults=Faults(0.4, 0, ("reset_after",))) as server:
        target = store(server.create_bucket("once"))
        for index in range(12):
            assert target.create(f"k{index}", b"first")
            assert not target.create(f"k{index}", b"second")
            assert target.read(f"k{index}") == b"first"
        assert server.fault_counts()["reset_after"] > 0


def test_retries_wait_for_a_server_that_was_reached_before(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries are simulated; the refused connections are real."""
    with S3Server() as server:
        target = S3Store(server.create_bucket("restart"), RetryPolicy(request_seconds=60.0))
        target.check()
        identity = {name: os.environ[name] for name in S3Service.environment if name in os.environ}
    for name, value in {**identity, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageAwayError, match=r"does not answer .*[0-9]+ tries in"):
        target.check()
    assert 20 < clock[0] <= 30
    requests._reached.clear()  # the state of a new process
    with pytest.raises(StorageAwayError, match="does not answer") as error:
        target.check()
    assert "tries" not in error.value.what


# -- faults that are reported ----------------------------------------------------------------------------------------


def test_a_silent_store_is_reported_after_the_budget(silent: list[socket.socket]) -> None:
    """All operations run at once, since their time is spent waiting."""
    def error_of(operation: Callable[[Store], object]) -> StorageAwayError:
        with pytest.raises(StorageAwayError, match="takes requests but does not answer in time") as error:
            operation(S3Store("s3://bucket/data", SHORT))
        return error.value

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        errors = list(pool.map(error_of, OPERATIONS.values()))
    assert all("proxy" in error.fix for error in errors)
    tries = len(OPERATIONS) * int(SHORT.budget_seconds / SHORT.request_seconds + 1)
    # one policy: neither botocore nor s3fs multiplies the tries; on a busy machine a limit may pass before connecting
    assert len(silent) <= tries


@pytest.mark.parametrize("name", ["write", "read", "list", "size"])
def test_with_the_default_policy_silence_takes_about_half_a_minute(name: str, clock: list[float],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/checkpoints.md states this time. The clock is simulated: each try takes as long as it may."""
    began: list[float] = []

    def silence(transfer: object, service: object, work: object, seconds: float) -> None:
        began.append(clock[0])
        clock[0] += seconds
        raise SilentError(f"no answer within {seconds:g} s")

    monkeypatch.setattr(requests, "_wait", silence)
    for _ in range(20):
        clock[0] = 0.0
        began.clear()
        with pytest.raises(StorageAwayError, match="does not answer in time"):
            OPERATIONS[name](store("s3://bucket/data"))
        assert len(began) >= 3
        assert began[-1] <= 30 + 1
        assert 29 < clock[0] <= 40 + 1


def test_minutes_of_503_end_after_the_budget(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is simulated: each answer comes at once, and only the pauses take time."""
    tries: list[float] = []

    def answer(*arguments: object) -> None:
        tries.append(clock[0])
        clock[0] += 0.05
        raise ClientError({"Error": {"Code": "503"}}, "PutObject")

    monkeypatch.setattr(requests, "_wait", answer)
    for _ in range(50):
        clock[0] = 0.0
        tries.clear()
        with pytest.raises(StorageAwayError, match="object store failed"):
            store("s3://bucket/data").write("key", b"data")
        assert 20 < clock[0] <= 30 + 1
        assert 6 <= len(tries) <= 80


@pytest.mark.parametrize("kind", ["reset_before", "reset_after", "slow_down", "internal_error"])
def test_a_store_that_never_recovers_is_reported_away(kind: str, server: S3Server) -> None:
    target = S3Store(server.create_bucket("broken") + "/data", PATIENT)
    server.fail(Faults(1.0, 0, (kind,)))
    with pytest.raises(StorageAwayError, match="object store failed") as error:
        target.write("key", b"data")
    assert error.value.fix


def test_a_transfer_of_one_byte_a_second_is_reported(server: S3Server) -> None:
    bucket = server.create_bucket("slow")
    S3Store(bucket).write("key", bytes(100))
    server.fail(Faults(1.0, 0, ("trickle",)))

    def assert_reported(name: str) -> None:
        with pytest.raises(StorageAwayError, match="does not answer in time"):
            OPERATIONS[name](S3Store(bucket, RetryPolicy(request_seconds=2.5, budget_seconds=2.5)))

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(assert_reported, ("read", "list"))) == [None, None]


def test_a_slow_download_goes_on_while_it_makes_progress(server: S3Server) -> None:
    """It takes longer than a request without progress may take."""
    bucket = server.create_bucket("patient")
    S3Store(bucket).write("key", b"1234")
    server.fail(Faults(1.0, 0, ("trickle",)))
    policy = RetryPolicy(request_seconds=2.5, least_bytes_per_second=0.2, budget_seconds=60.0)
    assert S3Store(bucket, policy).read("key") == b"1234"


def test_a_bucket_in_another_region_is_found_or_reported(server: S3Server) -> None:
    server.fail(Faults(0.0, region="eu-west-1"))
    target = S3Store(server.create_bucket("far"), PATIENT)
    target.write("key", b"data")  # the refusal names the region, and the client asks there
    assert target.size("key") == 4
    server.fail(Faults(1.0, 0, (ELSEWHERE,), region="eu-west-1"))
    for name in ("check", "write", "read", "size"):
        with pytest.raises(StorageError, match="the bucket 'far' is in region eu-west-1") as error:
            OPERATIONS[name](target)
        assert "AWS_REGION=eu-west-1" in error.value.fix
        assert not isinstance(error.value, StorageAwayError)  # waiting does not help


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that writes a credentials file with an access key."""
    def renew(key: str) -> None:
        (tmp_path / "new").write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\n")
        (tmp_path / "new").replace(tmp_path / "credentials")

    return renew


@pytest.mark.parametrize("name", ["write", "size"])
@pytest.mark.parametrize("source", ["file", "environment"])
def test_expired_credentials_are_reported_and_renewed(source: str, name: str, server: S3Server, tmp_path: Path,
                                                      credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    """`size` sends a HEAD request, whose answer has no body that names the error."""
    bucket = server.create_bucket("session")
    S3Store(bucket).write("key", b"data")
    if source == "file":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        renew = credentials
    else:
        def renew(key: str) -> None:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    renew("FIRST")
    OPERATIONS[name](S3Store(bucket, PATIENT))
    server.fail(Faults(0.0, expired_key="FIRST"))
    with pytest.raises(StorageAwayError, match="the credentials have expired") as error:
        OPERATIONS[name](S3Store(bucket, PATIENT))
    assert "renew them" in error.value.fix
    before = server.fault_counts()["requests"]
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(OPERATIONS[name], S3Store(bucket))
        while server.fault_counts()["requests"] < before + 1:
            time.sleep(0.01)
        renew("SECOND")
        pending.result(timeout=LONG_SECONDS)


def test_a_wrong_clock_is_reported() -> None:
    refused = PermissionError("The difference between the request time and the current time is too large.")
    refused.__cause__ = ClientError({"Error": {"Code": "RequestTimeTooSkewed"}}, "PutObject")
    error = s3_errors.explained(refused, "s3://bucket/key", "bucket")
    assert "clock" in error.what
    assert "doctor" in error.fix


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_request_stops_when_its_time_limit_is_brought_forward(silent: list[socket.socket], name: str) -> None:
    limit = TimeLimit(what="the save")

    def end() -> None:
        while not silent:
            time.sleep(0.01)
        limit.end("the generation has ended")

    threading.Thread(target=end, daemon=True).start()
    endless = RetryPolicy(request_seconds=3600, budget_seconds=3600)
    with limit.applied(), pytest.raises(StorageAwayError, match="the save was stopped: the generation has ended"):
        OPERATIONS[name](S3Store("s3://bucket/data", endless))


def test_a_time_limit_comes_before_the_budget(silent: list[socket.socket]) -> None:
    with pytest.raises(StorageAwayError, match="the save took longer than 1 s"):
        bounded(lambda: store("s3://bucket/data").write("key", b"data"), TimeLimit(1.0, "the save"))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("endpoint", ["http://user:pLaNtEd@127.0.0.1:9", "user:pLa/NtEd@host", "https://pLaNtEd@host"])
def test_an_endpoint_with_a_password_is_refused_before_any_request(monkeypatch: pytest.MonkeyPatch, name: str,
                                                                   endpoint: str) -> None:
    monkeypatch.setenv(name, endpoint)
    monkeypatch.setattr(requests, "_wait", lambda *_: pytest.fail("a request was sent"))
    for use in (lambda: store("s3://bucket").read("key"), lambda: store("s3://bucket").check(),
                lambda: list(store("s3://bucket").list())):
        with pytest.raises(StorageError, match=f"contains a user or a password.*\\n.*remove.*{name}") as refused:
            use()
        assert not isinstance(refused.value, StorageAwayError)  # no caller waits for such a store
        assert "pLaNtEd" not in str(refused.value)
