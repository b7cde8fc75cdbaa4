"""One suite for every kind of store: a local folder, S3, Google Cloud Storage and Azure must behave alike."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.object_servers.az import AZServer
from tests.object_servers.gs import GSServer
from tidewheel import storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.storage import LocalStore, Stamp, Store, join, safe_key, split, store
from tidewheel.stores.objects.store import ObjectStore


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        running.create_bucket("a-bucket")  # a name that contains "bucket" must not confuse messages
        yield running


@pytest.fixture(scope="module")
def gs_server() -> Iterator[GSServer]:
    pytest.importorskip("gcsfs")
    with GSServer() as running:
        running.create_bucket("a-bucket")
        yield running


@pytest.fixture(scope="module")
def az_server() -> Iterator[AZServer]:
    pytest.importorskip("adlfs")
    with AZServer() as running:
        running.create_bucket("a-bucket")
        yield running


SERVERS = {"s3": "server", "gs": "gs_server", "az": "az_server"}


@pytest.fixture(params=["local", *SERVERS])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return store(tmp_path / "root")
    request.getfixturevalue(SERVERS[request.param])
    return store(f"{request.param}://a-bucket/{uuid.uuid4().hex}")


# -- reading and writing -----------------------------------------------------------------------


def test_a_written_object_is_read_back_with_its_stamp(target: Store) -> None:
    data = os.urandom(100_000)
    stamp = target.write("a/b/c.bin", data)
    assert stamp == Stamp("a/b/c.bin", len(data), "blake3-" + blake3(data).hexdigest())
    assert target.read("a/b/c.bin") == data
    assert target.exists("a/b/c.bin")
    assert target.size("a/b/c.bin") == len(data)
    assert target.hash("a/b/c.bin") == stamp.hash == storage.content_hash(data)
    assert target.verify(stamp) == ""
    target.write("a/b/c.bin", data[:-1])
    assert "bytes, expected" in target.verify(stamp)
    target.write("a/b/c.bin", data[:-1] + bytes([data[-1] ^ 1]))
    assert "hash differs" in target.verify(stamp)
    target.delete("a/b/c.bin")
    assert target.verify(stamp) == "missing"


def test_an_empty_object_is_read_back(target: Store) -> None:
    stamp = target.write("empty", b"")
    assert (stamp.bytes, target.read("empty"), target.size("empty")) == (0, b"", 0)
    assert [entry.key for entry in target.list()] == ["empty"]


@pytest.mark.parametrize(("start", "length"), [(0, None), (3, 4), (0, 0), (3, 0), (95, 10), (100, 5), (200, None),
                                               (7, None), (0, 1000)])
def test_ranges_are_slices(target: Store, start: int, length: int | None) -> None:
    data = bytes(range(100))
    target.write("x", data)
    assert target.read("x", start, length) == data[start:None if length is None else start + length]


def test_ranges_of_an_empty_object_are_empty(target: Store) -> None:
    target.write("x", b"")
    assert target.read("x", 0, 10) == b""
    assert target.read("x", 5) == b""


def test_a_long_object_streams_in_parts(target: Store) -> None:
    block = os.urandom(1 << 20)
    with target.writer("long") as sink:
        for _ in range(35):
            sink.write(block)
    assert sink.stamp.bytes == 35 << 20
    assert target.verify(sink.stamp) == ""
    with target.open("long") as stream:
        assert stream.seek(-10, io.SEEK_END) == (35 << 20) - 10
        assert stream.read() == block[-10:]
        stream.seek((1 << 20) + 5)
        assert stream.read(20) == block[5:25]
        assert stream.tell() == (1 << 20) + 25


def test_one_write_may_be_longer_than_a_part(target: Store) -> None:
    data = os.urandom((33 << 20) + 7)
    assert target.verify(target.write("big", data)) == ""


@pytest.mark.parametrize("data", [b"bytes", bytearray(b"array"), memoryview(b"view"), np.arange(7, dtype=np.uint16),
                                  np.zeros(0), np.zeros((0, 3)), np.arange(6).reshape(2, 3), pa.py_buffer(b"arrow")])
def test_writer_takes_any_buffer(target: Store, data: object) -> None:
    with target.writer("x") as sink:
        assert sink.write(data) == memoryview(data).nbytes
    assert target.read("x") == memoryview(data).tobytes()


def test_arrow_writes_to_a_writer_and_reads_a_stream(target: Store) -> None:
    table = pa.table({"a": pa.array(range(100_000)), "b": pa.array([str(i) for i in range(100_000)])})
    with target.writer("t.arrow") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    with target.open("t.arrow") as stream:
        assert pa.ipc.open_file(stream).read_all() == table


def test_json_is_read_back(target: Store) -> None:
    first = target.write_json("m.json", {"b": 1, "a": [1.5, None, "ü"]})
    assert target.read_json("m.json") == {"a": [1.5, None, "ü"], "b": 1}
    assert target.write_json("m.json", {"a": [1.5, None, "ü"], "b": 1}) == first
    target.write("m.json", b'{"a": ')
    with pytest.raises(StorageError, match="not valid JSON"):
        target.read_json("m.json")


# -- atomicity ---------------------------------------------------------------------------------


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("size", [10, 40 << 20])
@pytest.mark.parametrize("error", [_Interrupted, KeyboardInterrupt, FileNotFoundError, PermissionError, OSError])
def test_aborted_write_leaves_nothing_and_passes_the_error_on(target: Store, size: int, error: type) -> None:
    target.write("kept", b"before")
    for key in ("new", "kept"):
        with pytest.raises(error, match="the caller's own") as caught:  # noqa: PT012
            with target.writer(key) as sink:
                sink.write(bytes(size))
                raise error("the caller's own")
        assert type(caught.value) is error  # not wrapped in a storage error
    assert not target.exists("new")
    assert target.read("kept") == b"before"
    assert [entry.key for entry in target.list()] == ["kept"]
    if isinstance(target, ObjectStore):
        assert list(target.uploads()) == []  # Google and Azure list no uploads, which expire there
    else:
        assert os.listdir(target.uri) == ["kept"]


def test_readers_see_the_old_or_the_new_object_never_a_mixture(target: Store) -> None:
    old, new = b"a" * 300_000, b"b" * 400_000
    target.write("x", old)
    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(target.read, "x") for _ in range(10)]
        for data in (new, old) * 5:
            target.write("x", data)
            reads.append(pool.submit(target.read, "x"))
    assert {read.result() for read in reads} <= {old, new}


def test_nothing_is_visible_before_the_end(target: Store) -> None:
    with target.writer("x") as sink:
        sink.write(bytes(40 << 20))
        assert not target.exists("x")
        assert list(target.list()) == []
    assert target.exists("x")


def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        store(tmp_path).write("x", b"1")
    assert os.listdir(tmp_path) == []


def _begin_and_die(target: Store) -> None:
    with target.writer("folder/long") as sink:
        sink.write(bytes(40 << 20))
        os.kill(os.getpid(), signal.SIGKILL)


def test_unfinished_uploads_of_a_killed_writer_are_listed_and_aborted(target: Store) -> None:
    """S3 stores keep and charge for unfinished multipart uploads; a local folder keeps a temporary file."""
    child = multiprocessing.get_context("spawn").Process(target=_begin_and_die, args=(target,))
    child.start()
    child.join(60)
    assert list(target.list()) == []
    if target.uri.startswith(("gs://", "az://")):  # uploads expire there
        assert list(target.uploads()) == []
        return
    [unfinished] = target.uploads()
    assert target.uploads("folder") == [unfinished]
    assert list(target.uploads("elsewhere")) == []
    target.write("later", b"1")
    with target.writer("under/way") as sink:
        sink.write(bytes(40 << 20))
        assert target.abort_uploads(before=unfinished.started) == 0
        assert target.abort_uploads("elsewhere", before=time.time() + 1000) == 0
        assert target.abort_uploads("folder", before=target.written_at("later") + 1) == 1
    assert list(target.uploads()) == []
    assert [entry.key for entry in target.list()] == ["later", "under/way"]
    target.abort(unfinished)  # aborting again is no error


@pytest.mark.parametrize("write", [lambda target: target.write("y", b"2"), lambda target: target.create("y", b"2")])
def test_a_folder_that_disappeared_is_not_created_again(tmp_path: Path, write) -> None:
    """It may be on a disk that is mounted again later and would then hide what was written meanwhile."""
    target = store(tmp_path / "run")
    target.write("x", b"1")
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(StorageAwayError, match="the folder is gone") as error:
        write(target)
    assert "mount" in error.value.fix
    (tmp_path / "run").mkdir()  # the empty mount point
    with pytest.raises(StorageAwayError, match="another one is in its place"):
        write(target)
    (tmp_path / "run").rmdir()
    shutil.copytree(tmp_path / "away", tmp_path / "run")  # mounted again: another device, the same content
    write(target)
    assert target.read("y") == b"2"
    elsewhere = pickle.loads(pickle.dumps(target))
    (tmp_path / "run").rename(tmp_path / "moved")
    write(elsewhere)  # a store opened on another machine may create it


def test_a_full_disk_is_reported_with_a_fix_for_any_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a file writes its buffer and fails again, which must not hide the first error."""
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", *rest: real(Path("/dev/full"), mode) if "w" in mode
                        else real(self, mode, *rest))
    for size in (10, 5_000, 100_000):
        with pytest.raises(StorageError, match="No space left on device") as error:
            store(tmp_path).write("x", bytes(size))
        assert "free some space" in error.value.fix


# -- keys --------------------------------------------------------------------------------------

HOSTILE = ["", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a/./b", "a//b", "a/", "a\\b", "a\x00b"]


@pytest.mark.parametrize("key", HOSTILE)
def test_keys_that_leave_the_root_are_refused(target: Store, key: str) -> None:
    for operation in (target.open, target.read, target.exists, target.size, target.delete, target.hash, target.at,
                      target.child, target.fingerprint, target.delete_tree, lambda k: target.write(k, b"")):
        with pytest.raises(StorageError, match="would leave its folder"):
            operation(key)


@given(st.text(alphabet="ab./\\\x00 ~:", max_size=12))
def test_safe_keys_stay_below_any_root(key: str) -> None:
    try:
        safe_key(key)
    except StorageError:
        return
    assert os.path.normpath(os.path.join("/root/x", key)).startswith("/root/x/")


@pytest.mark.parametrize("key", ["with space", "ü/é", "a+b=c&d", "100%", "c#1?x", "x" * 200])
def test_unusual_keys_are_kept(target: Store, key: str) -> None:
    target.write(key, b"1")
    assert target.read(key) == b"1"
    assert [entry.key for entry in target.list()] == [key]
    target.delete(key)
    assert not target.exists(key)


# -- missing, listing, deleting ----------------------------------------------------------------


def test_missing_objects_raise_not_found(target: Store) -> None:
    target.write("folder/file", b"1")
    for key in ("none", "none/below", "folder/file/below"):
        for operation in (target.open, target.read, target.size, target.fingerprint, lambda k: target.read(k, 3, 2),
                          lambda k: target.read(k, 0, 0)):
            with pytest.raises(FileNotFoundError):
                operation(key)
        assert not target.exists(key)
        target.delete(key)
        target.delete_tree(key)
    assert not target.exists("folder")  # a folder is not an object
    with pytest.raises(FileNotFoundError):
        target.size("folder")
    assert list(target.list("none")) == []


def test_objects_are_listed_matched_and_deleted(target: Store) -> None:
    keys = ["a.jsonl", "ab/c.jsonl", "a/x.jsonl", "a/deep/y.jsonl", "a/deep/z.txt", "b/x.jsonl.gz"]
    for key in keys:
        target.write(key, key.encode())
    assert [entry.key for entry in target.list()] == sorted(keys)
    assert {entry.key: entry.bytes for entry in target.list()} == {key: len(key) for key in keys}
    assert [entry.key for entry in target.list("a")] == ["a/deep/y.jsonl", "a/deep/z.txt", "a/x.jsonl"]
    assert list(target.glob("a/*.jsonl")) == ["a/x.jsonl"]
    assert list(target.glob("./a/*.jsonl")) == ["a/x.jsonl"]
    assert list(target.glob("*.jsonl")) == ["a.jsonl"]
    assert list(target.glob("**/*.jsonl")) == ["a.jsonl", "a/deep/y.jsonl", "a/x.jsonl", "ab/c.jsonl"]
    assert list(target.glob("a/**")) == ["a/deep/y.jsonl", "a/deep/z.txt", "a/x.jsonl"]
    assert list(target.glob("?/*.jsonl*")) == ["a/x.jsonl", "b/x.jsonl.gz"]
    assert list(target.glob("a/x.jsonl")) == ["a/x.jsonl"]
    target.delete_tree("a")
    assert [entry.key for entry in target.list()] == ["a.jsonl", "ab/c.jsonl", "b/x.jsonl.gz"]


def test_more_than_a_page_of_objects_is_listed(target: Store) -> None:
    """A page of s3 and gs has 1,000 objects; one of az has 5,000, which its emulator takes a minute to store."""
    if target.uri.startswith("az://"):
        pytest.skip("5,000 objects a page")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: target.write(f"many/{n:05d}", b""), range(1010)))
    assert [entry.key for entry in target.list("many")] == [f"many/{n:05d}" for n in range(1010)]
    target.delete_tree("many")
    assert list(target.list()) == []


def test_fingerprint_changes_with_the_content_alone(target: Store) -> None:
    target.write("x", b"one")
    target.write("y", b"one")
    first = target.fingerprint("x")
    assert first == target.fingerprint("y")
    target.write("x", b"two")
    assert target.fingerprint("x") != first
    target.write("x", b"one")
    assert target.fingerprint("x") == first


def test_left_over_temporary_files_are_not_listed(tmp_path: Path) -> None:
    target = store(tmp_path)
    (tmp_path / f"{storage.TEMPORARY_PREFIX}killed").write_bytes(b"half")
    target.write("x", b"1")
    assert [entry.key for entry in target.list()] == ["x"]


# -- stores travel -----------------------------------------------------------------------------


def test_children_and_pickled_stores_share_the_root(target: Store) -> None:
    below = pickle.loads(pickle.dumps(target.child("a", "b/c")))
    below.write("x", b"1")
    assert target.read("a/b/c/x") == b"1"
    assert below.at("x") == join(target.uri, "a/b/c/x")
    folder, name = split(below.at("x"))
    assert folder.read(name) == b"1"
    assert (target.local_path("a") is None) == storage.is_remote(target.uri)
    target.check()


def test_many_threads_share_a_store(target: Store) -> None:
    def work(index: int) -> bool:
        data = os.urandom(50_000 + index)
        stamp = target.write(f"t/{index}", data)
        return target.read(f"t/{index}") == data and target.verify(stamp) == "" and target.exists(f"t/{index}")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    assert len(target.list("t")) == 40


def _in_child(target: Store, answers: multiprocessing.Queue) -> None:
    target.write("from-child", b"2")
    answers.put(target.read("x"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_works_in_a_child_process(target: Store, method: str) -> None:
    target.write("x", b"1")  # starts the client before the fork
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(target, answers))
    child.start()
    assert answers.get(timeout=60) == b"1"
    child.join(60)
    assert target.read("from-child") == b"2"


# -- URIs --------------------------------------------------------------------------------------


def test_each_uri_opens_its_store(tmp_path: Path) -> None:
    assert store(f"file://{tmp_path}/a%20b").uri == f"{tmp_path}/a b"
    assert isinstance(store("plain/relative"), LocalStore)
    assert store("S3://a-bucket/x/").uri == "s3://a-bucket/x"
    assert storage.is_remote("S3://x")
    assert join("s3://b/", "/a/", "", "c") == "s3://b/a/c"
    assert join("/", "a") == "/a"
    assert split("conf.yaml")[1] == "conf.yaml"
    assert split("/conf.yaml")[0].uri == "/"
    assert split("s3://a-bucket/conf.yaml")[0].uri == "s3://a-bucket"


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3:/bucket/x", "gs://", "az:///x", "gs:/bucket/x", "http://host/x",
                                 "file://host/x", "s3://user:password@bucket/x", "no_such_module:Store://x"])
def test_invalid_uris_are_refused(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        store(uri)
    assert caught.value.fix


@pytest.mark.parametrize("uri", ["s3://bucket", "folder/", "..", "."])
def test_a_folder_is_not_read_as_a_file(uri: str) -> None:
    with pytest.raises(StorageError, match="names a folder"):
        split(uri)


# -- errors ---------------------------------------------------------------------------

OPERATIONS = [lambda p: p.check(), lambda p: p.read("x"), lambda p: p.write("x", b"1"), lambda p: list(p.list()),
              lambda p: p.open("x"), lambda p: p.exists("x"), lambda p: p.fingerprint("x"), lambda p: p.glob("*"),
              lambda p: p.write("x", bytes(40 << 20))]


@pytest.mark.parametrize("scheme", SERVERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_bucket_is_reported(request: pytest.FixtureRequest, scheme: str, operation) -> None:
    request.getfixturevalue(SERVERS[scheme])
    with pytest.raises(StorageError, match="there is no bucket 'not-there'") as caught:
        operation(store(f"{scheme}://not-there/prefix"))
    assert "create the " in caught.value.fix


def test_an_impossible_bucket_name_is_refused(server: S3Server) -> None:
    with pytest.raises(StorageError):
        store("s3://Not A Bucket/x").check()


def test_wrong_credentials_are_reported() -> None:
    with S3Server(accept_all=False):
        for operation in OPERATIONS:
            with pytest.raises(StorageError, match="access refused") as caught:
                operation(store("s3://a-bucket/prefix"))
            assert "AWS_ACCESS_KEY_ID" in caught.value.fix


def test_missing_credentials_are_reported(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="access refused"):
        store("s3://a-bucket/prefix").check()


@pytest.mark.parametrize("operation", OPERATIONS[:3])
def test_an_unavailable_endpoint_is_reported_soon(server: S3Server, monkeypatch: pytest.MonkeyPatch, operation) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(StorageError, match="does not answer") as caught:
        operation(store("s3://a-bucket/prefix"))
    assert time.monotonic() - began < 10
    assert "AWS_ENDPOINT_URL" in caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError):
        store(tmp_path).write("x", b"1")
    with pytest.raises(StorageError):
        store(tmp_path).check()


def test_a_file_in_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    target = store(tmp_path)
    target.write("x", b"1")
    for operation in (lambda: target.write("x/y", b"1"), lambda: store(tmp_path / "x").check(),
                      lambda: store(tmp_path / "x").write("y", b"1")):
        with pytest.raises(StorageError):
            operation()
    target.write("folder/y", b"1")
    for operation in (lambda: target.open("folder"), lambda: target.read("folder"),
                      lambda: target.write("folder", b"1")):
        with pytest.raises(StorageError):
            operation()
    assert os.listdir(tmp_path / "folder") == ["y"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_folder_that_goes_away_during_a_write_is_the_error_that_is_raised(tmp_path: Path, is_first: bool) -> None:
    root = tmp_path / "root"
    LocalStore(root).write("before", b"1")
    disk = LocalStore(root)
    if not is_first:
        disk.write("before", b"1")

    def write() -> None:
        with disk.writer("during") as sink:
            sink.write(b"2")
            root.rename(tmp_path / "elsewhere")

    for attempt in range(2):
        with pytest.raises(StorageAwayError, match="the folder is gone"):
            write() if attempt == 0 else disk.write("again", b"1")
        assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    disk.write("after", b"3")
    assert disk.read("before") == b"1"
    assert disk.read("after") == b"3"
    assert not disk.exists("during")
