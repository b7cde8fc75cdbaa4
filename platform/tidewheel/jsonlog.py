"""Append-only JSON lines that survive restarts, on any store.

In a local folder a log is one file. Objects cannot be appended to, so on an object store the log `metrics.jsonl` is a
folder of segments. At each flush a writer rewrites its newest segment as a whole, and starts another one when it has
about `SEGMENT_BYTES`. A run of a month has hundreds of segments, and nothing is compacted or deleted. The names of
segments, `g<order>-<ordinal>-<writer>-<segment>.jsonl`, sort without clocks: by the writer's order (the generation of
workers, for example), then by the sequence in which writers of one order joined, then by segment number. `read` also
accepts the logs of older releases, which have one object per flush, named by the clock; these sort first.

`append` never fails because of storage. At most `MAX_PENDING_BYTES` of lines wait in memory. Beyond that the oldest are
dropped, and the log records how many as soon as it can be written again. `read` returns the same lines from any store.
It omits the line that a killed writer left half-written, and returns a line that was written twice only once: a process
that takes over from a lost writer appends all lines that this writer may not have written (`JsonLog.unwritten`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel.errors import StorageError
from tidewheel.storage import Store

EVENTS = "events.jsonl"
"""Log of a run's events. Only here `read` returns the notes about dropped lines by default."""
FLUSH_SECONDS = 5.0
"""Time between two writes of a log to an object store."""
SEGMENT_BYTES = 1 << 20
"""A segment of this length is complete. Twice the length halves the number of objects and doubles the bytes sent."""
NO_GENERATION = 999_999_999_999
"""Order of a writer that belongs to no generation and has few lines, such as an evaluator or an agent."""
MAX_PENDING_BYTES = 16 << 20
"""Lines that may wait in memory while storage fails; enough for hours of a run's metrics."""
RETRY_SECONDS = 1.0
"""Time before a failed write to a local file is tried again."""
CLOSE_SECONDS = 0.5
"""`close` waits this long for the last write; a healthy store takes less."""
DROPPED = "log_dropped"
"""Kind of the record that counts the lines dropped before it."""
_BLOCK_BYTES = 256 << 10
_READS_AT_ONCE = 8


class JsonLog:
    """Thread-safe writer of one log. Several writers may append to the same log.

    Args:
        store: the run's store.
        key: name of the log, such as "metrics.jsonl".
        flush_seconds: on an object store, collect lines for this long before writing.
        order: on an object store, these lines are read after those of writers with a lower order.
        alone: skip the list request that finds earlier writers of the same order.
    """

    def __init__(self, store: Store, key: str, flush_seconds: float = FLUSH_SECONDS, *, order: int = 0,
                 alone: bool = False) -> None:
        self._key, self._flush_seconds = key, flush_seconds
        path = store.local_path(key)
        self._local = path is not None
        self._sink: _File | _Segments = _File(path) if path is not None else _Segments(store, key, order, alone)
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._dropped = 0
        self._sending: list[bytes] = []  # lines of the present or failed try, which may have arrived anyway
        self._last_flush = time.monotonic()
        self._failed_at: float | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Append one line. This never fails because of storage.

        Local logs are written at once. Remote logs are written soon, in a thread, so callers never wait for the store.
        """
        self._append(json.dumps(record, separators=(",", ":"), default=_plain).encode() + b"\n")

    def unwritten(self) -> list[str]:
        """Return the lines that are only in this process."""
        with self._lock:
            return [line.decode() for line in (*self._sending, *self._pending)]

    @property
    def is_written(self) -> bool:
        """Whether all lines have been written out."""
        with self._lock:
            return not self._sending and not self._pending

    def restore(self, lines: Sequence[str]) -> None:
        """Append the `unwritten` lines of another writer, which may have written some of them meanwhile."""
        for line in lines:
            self._append(line.encode())

    def flush_due(self) -> None:
        """Call `flush_soon` if the last flush was at least `flush_seconds` ago."""
        if time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Start writing the collected lines, and do not wait. While the store fails, the lines are kept."""
        with self._lock:
            if not (self._pending or self._sending) or (self._thread is not None and self._thread.is_alive()):
                return
            self._last_flush = time.monotonic()
            if not self._local:
                self._thread = threading.Thread(target=self._try, name=f"log {self._key}", daemon=True)
                self._thread.start()
                return
        self._try()

    def flush(self) -> None:
        """Write the collected lines.

        Raises:
            StorageError: the store failed; the lines are kept.
        """
        with self._writing:  # two flushes could otherwise publish out of order
            self._last_flush = time.monotonic()
            while lines := self._next():
                try:
                    self._sink.write(lines)
                except BaseException:
                    self._failed_at = time.monotonic()
                    raise
                self._failed_at = None
                with self._lock:
                    self._sending = []

    def close(self) -> None:
        """Write the collected lines; nothing may be appended afterwards.

        If the store fails or is slow, the log is written in the background for as long as the process lives.
        """
        self.flush_soon()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self.unwritten():
            threading.Thread(target=self._keep_trying, name=f"end of log {self._key}", daemon=True).start()

    def _keep_trying(self) -> None:
        self._try()
        while self.unwritten():
            time.sleep(FLUSH_SECONDS)
            self._try()

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._pending.append(line)
            self._pending_bytes += len(line)
            while self._pending_bytes > MAX_PENDING_BYTES:
                self._pending_bytes -= len(self._pending.popleft())
                self._dropped += 1
        if not self._local:
            self.flush_due()
        elif self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._try()

    def _next(self) -> list[bytes]:
        """Return the lines to write now: those of the failed try, else the pending lines that fit."""
        with self._lock:
            if self._sending:
                return self._sending
            if self._dropped:
                self._sending.append(self._note())
                self._dropped = 0
            room = self._sink.room()
            while self._pending and room > 0:
                line = self._pending.popleft()
                self._pending_bytes -= len(line)
                room -= len(line)
                self._sending.append(line)
            return self._sending

    def _note(self) -> bytes:
        record = {"time": time.time(), "kind": DROPPED, "detail": {"log": self._key, "lines": self._dropped}}
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"

    def _try(self) -> None:
        # the next try may succeed; callers that need to know use `flush`
        with contextlib.suppress(StorageError, OSError):
            self.flush()


class _File:
    """Local file that lines are appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made, self._whole = False, False

    def room(self) -> int:
        return SEGMENT_BYTES

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines in one system call, so that those of several writers never interleave."""
        data = b"".join(lines)
        try:
            if not self._made:  # only once: a folder that vanishes later may be on a disk that comes back
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._made = True
            if not self._whole and self._is_torn():
                data = b"\n" + data  # keep the first record off the torn line of a killed writer
            self._whole = False
            with self._path.open("ab", buffering=0) as sink:
                written = sink.write(data)
        except OSError as error:
            raise StorageError(f"cannot write the log: {error.strerror}", where=str(self._path),
                               fix="check free space, and that the folder exists and can be written to") from None
        if written != len(data):
            raise StorageError("cannot write the log: no space left", where=str(self._path), fix="free some space")
        self._whole = True

    def _is_torn(self) -> bool:
        """Return whether the file ends in the middle of a line."""
        try:
            with self._path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(size - 1, 0))
                return stream.read(1) not in (b"", b"\n")
        except FileNotFoundError:
            return False


class _Segments:
    """Segments on an object store. The newest one is rewritten with new lines."""

    def __init__(self, store: Store, key: str, order: int, alone: bool) -> None:
        self._store, self._key = store, key
        self._order, self._writer = f"g{order:012d}-", uuid.uuid4().hex[:8]
        self._ordinal: int | None = 0 if alone else None
        self._number = 0
        self._content = b""
        """Content of the newest segment."""
        self._ends = False

    def room(self) -> int:
        return SEGMENT_BYTES - len(self._content)

    def write(self, lines: Sequence[bytes]) -> None:
        """Add lines to the newest segment. After a failure, the next call must have the same lines."""
        if self._ordinal is None:
            self._ordinal = self._next_ordinal()
        name = f"{self._order}{self._ordinal:06d}-{self._writer}-{self._number:06d}.jsonl"
        content = self._content + b"".join(lines)
        try:
            self._store.write(f"{self._key}/{name}", content)
        except BaseException:
            # The request may still arrive late, so this segment must not grow any further.
            self._ends = True
            raise
        self._content = content
        if self._ends or len(content) >= SEGMENT_BYTES:
            self._content, self._ends = b"", False
            self._number += 1

    def _next_ordinal(self) -> int:
        """Return an ordinal above those of all earlier writers of this order."""
        entries = self._store.list_named(self._key, self._order)
        taken = [entry.key.rpartition("/")[2].split("-")[1] for entry in entries]
        return max((int(ordinal) for ordinal in taken), default=-1) + 1


def read(store: Store, key: str, *, with_dropped: bool = False) -> list[dict[str, Any]]:
    """Return all records of a log, oldest first; [] if the log does not exist.

    Args:
        store: the run's store.
        key: name of the log.
        with_dropped: also return the notes about dropped lines (`DROPPED`); for `EVENTS` this is the default.
    """
    if store.local_path(key) is not None:
        raw = store.read(key) if store.exists(key) else b""
    else:
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:  # latency dominates: one request per segment
            raw = b"".join(pool.map(lambda entry: store.read(entry.key), store.list(key)))
    return list(_records(dict.fromkeys(raw.split(b"\n")), with_dropped or key == EVENTS))


def newest_first(store: Store, key: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a log, newest first, and read it lazily. A line that was written twice may come twice.

    On an object store the newest records cost a listing and one request.
    """
    if store.local_path(key) is not None:
        if store.exists(key):
            with store.open(key) as stream:
                yield from _records(_backwards(stream), key == EVENTS)
        return
    for segments in (lambda: store.list_named(key, "g"), lambda: _old_segments(store, key)):
        for content in _contents(store, [entry.key for entry in reversed(segments())]):
            yield from _records(reversed(content.split(b"\n")), key == EVENTS)


def _old_segments(store: Store, key: str) -> Sequence[Any]:
    """Return the objects of an older release, which wrote one per flush. They are listed only if needed."""
    return [entry for entry in store.list(key) if not entry.key.startswith(f"{key}/g")]


def _contents(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the contents of objects, in increasingly large parallel reads."""
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        at, count = 0, 1
        while at < len(keys):
            yield from pool.map(store.read, keys[at:at + count])
            at += count
            count = min(2 * count, _READS_AT_ONCE)


def _backwards(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, last line first."""
    at, head = stream.seek(0, os.SEEK_END), b""
    while at:
        begin = max(0, at - _BLOCK_BYTES)
        stream.seek(begin)
        head, *lines = (stream.read(at - begin) + head).split(b"\n")
        yield from reversed(lines)
        at = begin
    yield head


def _records(lines: Iterable[bytes], with_dropped: bool) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # empty, or torn by a kill; the audit of a run reports missing records
            continue
        if isinstance(record, dict) and (record.get("kind") != DROPPED or with_dropped):
            yield record


def _plain(value: Any) -> Any:
    """Return a JSON value for an object that json cannot write: NumPy and torch scalars as numbers, others as text."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)
