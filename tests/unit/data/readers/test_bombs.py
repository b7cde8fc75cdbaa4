"""Small files that decompress to very large ones: the memory of the readers stays bounded.

Each test reads in a process of its own and looks at the most memory that it ever held. The processes are forks of one
that has imported the readers.
"""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.data.compression import zstd
from tidewheel.data.config import ReadConfig
from tidewheel.data.readers import columns, read_records
from tidewheel.errors import InputError
from tidewheel.storage import store

MEBIBYTE = 1 << 20
LIMIT = 4 * MEBIBYTE  # read.max_record_bytes
BOUND = 160  # MiB beyond what reading a small file takes; what the bombs hold is 200 and more
READ = """
import collections, json, os, sys
from pathlib import Path
from tidewheel.data.config import ReadConfig
from tidewheel.data.quarantine import Bad
from tidewheel.data.readers import read_records
from tidewheel.storage import store
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
def read(folder, name, config):
    counted = collections.Counter()
    for each in read_records(store(folder), name, config):
        counted[each.reason if isinstance(each, Bad) else len(each.text)] += 1
    return sorted(counted.items(), key=str)
def answer(folder, settings, ending):
    config = ReadConfig(paths=("*",), **settings)
    read(folder, "small" + ending, config)
    before = peak()
    counted = read(folder, "bomb" + ending, config)
    print(json.dumps([counted, peak() - before >> 10]), flush=True)
for line in sys.stdin:
    if os.fork() == 0:  # its peak begins at the memory that it has now
        answer(*json.loads(line))
        os._exit(0)
    if os.wait()[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    """Start the process whose forks read the bombs."""
    with subprocess.Popen([sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={"PYTHONPATH": ":".join(sys.path)}) as process:
        yield process


@pytest.fixture
def read(reader, tmp_path):
    return functools.partial(_read, reader, tmp_path)


def _read(reader, folder, ending, **settings):
    """Return what the bomb holds, [[length or reason, how often], ...], after a check of the memory."""
    print(json.dumps([str(folder), {"max_record_bytes": LIMIT, **settings}, ending]), file=reader.stdin, flush=True)
    answer = json.loads(reader.stdout.readline())
    assert answer is not None, "the reader fails: see stderr"
    counted, mebibytes = answer
    assert mebibytes < BOUND
    return counted


def parquet(path, values, **options):
    pq.write_table(pa.table({"text": values}), path, compression="zstd", **options)


def arrow(path, values):
    table = pa.table({"text": values})
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table)


def repeated(value, times):
    """`times` rows that all are the one entry of a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


@pytest.mark.parametrize(("kind", "size", "found"), [
    ("dictionary", 3 * MEBIBYTE, [[3 * MEBIBYTE, 120]]),
    ("delta", 5 * MEBIBYTE, [["record_too_long", 120]]),
    pytest.param("dictionary", 5 * MEBIBYTE, [["record_too_long", 120]], marks=pytest.mark.long),
    pytest.param("delta", 3 * MEBIBYTE, [[3 * MEBIBYTE, 120]], marks=pytest.mark.long),
])
def test_parquet_whose_rows_share_one_value(read, tmp_path, kind, size, found):
    options = {"use_dictionary": True} if kind == "dictionary" else {
        "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    parquet(tmp_path / "small.parquet", ["a", "b"], **options)
    values = repeated("x" * size, 120) if kind == "dictionary" else pa.array(["x" * size] * 120)
    parquet(tmp_path / "bomb.parquet", values, store_schema=False, **options)
    assert (tmp_path / "bomb.parquet").stat().st_size < 20_000
    assert read(".parquet") == found


@pytest.mark.parametrize(("size", "found"), [(3 * MEBIBYTE, [[3 * MEBIBYTE, 120]]),
                                             (5 * MEBIBYTE, [["record_too_long", 120]])])
def test_arrow_whose_rows_share_one_value(read, tmp_path, size, found):
    arrow(tmp_path / "small.arrow", pa.array(["a", "b"]))
    arrow(tmp_path / "bomb.arrow", repeated("x" * size, 120))
    assert read(".arrow") == found


def test_arrow_views_of_one_value(read, tmp_path):
    value = pa.array(["x" * 3 * MEBIBYTE], pa.string_view())
    views, data = value.buffers()[1:]
    shared = pa.Array.from_buffers(pa.string_view(), 120, [None, pa.py_buffer(views.to_pybytes()[:16] * 120), data])
    arrow(tmp_path / "small.arrow", pa.array(["a"], pa.string_view()))
    arrow(tmp_path / "bomb.arrow", shared)
    assert read(".arrow") == [[3 * MEBIBYTE, 120]]


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_one_chat_that_repeats_one_value(read, tmp_path, ending):
    says = pa.StructArray.from_arrays([repeated("user", 400), repeated("x" * 2 * MEBIBYTE, 400)], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 0, 400], pa.int32()), says)  # a chat of nothing before it
    good = pa.array([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
    for name, values in (("small", good), ("bomb", chats)):
        table = pa.table({"messages": values})
        if ending == ".parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet", store_schema=False)
        else:
            with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as sink:
                sink.write_table(table)
    assert read(ending, kind="chat") == [["empty_conversation", 1], ["record_too_long", 1]]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_packed_text_of_400_mebibytes(read, tmp_path, pack, format):
    ending = {gzip.compress: ".gz", zstd.compress: ".zst"}[pack]
    (tmp_path / f"small{ending}").write_bytes(pack(b'{"text": "a"}'))
    part = pack(b"x" * 50 * MEBIBYTE)  # members, or frames, that follow each other are one file
    (tmp_path / f"bomb{ending}").write_bytes(part * 8)
    assert read(ending, format=format) == [["record_too_long", 1]]


@pytest.mark.parametrize(("format", "head"), [("json", b'[{"text": "'), ("csv", b'id,text\n1,"')])
def test_one_record_of_200_mebibytes(read, tmp_path, format, head):
    (tmp_path / "small.gz").write_bytes(gzip.compress(head + b"x"))
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(head) + gzip.compress(b"x" * 50 * MEBIBYTE) * 4)
    (found, count), = read(".gz", format=format)
    assert (found, count) in (("truncated_file", 1), ("record_too_long", 1))


def record(body, more="", kind="response", media="application/http"):
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{more}\r\n".encode() if kind == "response" else b""
    content = head + body
    return (f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n"
            ).encode() + content + b"\r\n\r\n"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "record"])
def test_a_page_of_200_mebibytes(read, tmp_path, encoding):
    pytest.importorskip("trafilatura")
    pytest.importorskip("warcio")
    small = record(b"<html><body><p>Words.</p></body></html>")
    page = b" " * 200 * MEBIBYTE
    if encoding == "record":
        bomb = record(page, kind="conversion", media="text/plain")
    else:
        pack = {"gzip": gzip.compress, "deflate": zlib.compress}
        bomb = record(pack[encoding](page), f"Content-Encoding: {encoding}\r\n")
    (tmp_path / "small.warc.gz").write_bytes(gzip.compress(small))
    (tmp_path / "bomb.warc.gz").write_bytes(gzip.compress(bomb))
    reason = "record_too_long" if encoding == "record" else "no_main_text"
    assert read(".warc.gz") == [[reason, 1]]


@pytest.mark.parametrize("error", [pa.ArrowMemoryError("malloc of size 64 failed"), MemoryError()])
@pytest.mark.parametrize("fails", ["_columns", "_largest_value", "_arrow"])
def test_too_little_memory_raises_input_error(tmp_path, monkeypatch, error, fails):
    def failing(*_):
        raise error
    monkeypatch.setattr(columns, fails, failing)
    parquet(tmp_path / "a.parquet", ["a", "b"])
    arrow(tmp_path / "a.arrow", pa.array(["a", "b"]))
    name = "a.arrow" if fails == "_arrow" else "a.parquet"
    with pytest.raises(InputError, match="more memory than is available"):
        list(read_records(store(tmp_path), name, ReadConfig(paths=("*",))))
