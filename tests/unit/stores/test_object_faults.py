"""gs:// and az:// stores that misbehave: temporary faults are outlasted, others are reported with a hint."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.object_servers.az import AZServer
from tests.object_servers.base import ObjectServer
from tests.object_servers.gs import GSServer
from tidewheel.cluster.s3_faults import KINDS, Faults
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.retry import RetryPolicy
from tidewheel.storage import store
from tidewheel.stores.objects import store as object_store
from tidewheel.stores.objects import streams

PATIENT = RetryPolicy(request_seconds=60.0, budget_seconds=120.0, pause_seconds=0.01, longest_pause_seconds=0.01)


@pytest.fixture(params=[(GSServer, "gcsfs"), (AZServer, "adlfs")], ids=["gs", "az"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    kind, package = request.param
    pytest.importorskip(package)
    monkeypatch.setattr(object_store.retry, "POLICY", PATIENT)
    with kind() as running:
        yield running


def test_all_kinds_of_faults_are_outlasted(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(object_store, "READ_BYTES", 1 << 20)
    generator = random.Random(0)
    bucket_store = store(server.create_bucket("faulty") + "/data")
    contents = {f"k{number}": generator.randbytes(10 ** generator.randint(0, 5)) for number in range(12)}
    contents["long"] = generator.randbytes((5 << 20) + 7)
    contents["even"] = generator.randbytes(3 << 20)  # a multiple of a part
    server.faults = Faults(0.2, 1, KINDS)
    for key, data in contents.items():
        stamp = bucket_store.write(key, data)
        assert bucket_store.read(key) == data
        assert bucket_store.read(key, 3, 50) == data[3:53]
        assert bucket_store.read(key, 0, 1 << 30) == data
        assert bucket_store.verify(stamp) == ""
    sizes = {entry.key: entry.bytes for entry in bucket_store.list()}
    assert sizes == {key: len(data) for key, data in contents.items()}
    with pytest.raises(FileNotFoundError):
        bucket_store.read("nothing")
    bucket_store.delete_tree("k1")
    for key in contents:
        bucket_store.delete(key)
    assert list(bucket_store.list()) == []
    assert all(server.counts[kind] > 0 for kind in KINDS), server.counts


def test_an_object_is_created_once_even_if_answers_are_lost(server: ObjectServer) -> None:
    bucket_store = store(server.create_bucket("once"))
    server.faults = Faults(0.4, 0, ("reset_after",))
    for number in range(12):
        assert bucket_store.create(f"k{number}", b"first")
        assert not bucket_store.create(f"k{number}", b"second")
        assert bucket_store.read(f"k{number}") == b"first"
    assert server.counts["reset_after"] > 0


def test_an_upload_whose_last_answer_is_lost_is_published_once(server: ObjectServer,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 1 << 20)
    bucket_store = store(server.create_bucket("twice"))
    server.faults = Faults(0.5, 3, ("reset_after",))
    data = random.Random(0).randbytes((4 << 20) + 1)
    for number in range(4):
        assert bucket_store.verify(bucket_store.write(f"long{number}", data)) == ""


def test_an_aborted_upload_leaves_the_object_as_it_was(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 1 << 20)
    bucket_store = store(server.create_bucket("aborted"))
    bucket_store.write("key", b"before")
    with pytest.raises(KeyError), bucket_store.writer("key") as sink:  # noqa: PT012
        sink.write(bytes(3 << 20))
        raise KeyError("the caller's own")
    assert bucket_store.read("key") == b"before"


def test_a_store_that_never_recovers_is_reported(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store.retry, "POLICY", RetryPolicy(request_seconds=60.0, budget_seconds=0.2))
    bucket_store = store(server.create_bucket("broken"))
    for kind in ("internal_error", "slow_down", "reset_before"):
        server.faults = Faults(1.0, 0, (kind,))
        with pytest.raises(StorageAwayError, match="object store failed") as error:
            bucket_store.write("key", b"data")
        assert error.value.fix


def test_refused_access_says_which_credentials_are_used(server: ObjectServer) -> None:
    bucket_store = store(server.create_bucket("private"))
    server.accept_all = False
    for operation in (lambda: bucket_store.read("key"), lambda: bucket_store.write("key", b"1"), bucket_store.check,
                      bucket_store.list,
                      lambda: bucket_store.size("key")):
        with pytest.raises(StorageError, match="access refused") as error:
            operation()
        assert not isinstance(error.value, StorageAwayError)
        assert "doctor" in error.value.fix


def test_a_server_that_is_not_there_is_reported_soon(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 of the loopback: nothing listens there."""
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value.replace(server.endpoint, "http://127.0.0.1:9"))
    gone = store(f"{server.kind}://gone")
    for operation in (gone.check, lambda: gone.write("key", b"1"), lambda: gone.write("long", bytes(17 << 20))):
        with pytest.raises(StorageAwayError, match="does not answer") as error:
            operation()
        assert "tries" not in error.value.what  # an address that never answered is more likely wrong than down
