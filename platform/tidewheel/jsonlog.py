"""Append-only JSON lines that survive restarts, on any store.

On a local folder a log is one file, appended to. Objects cannot be appended to, so on an object store the log
`metrics.jsonl` is a folder of segments. A writer puts its newest segment again, whole, at each flush until it is about
`SEGMENT_BYTES` long, and begins the next: a run of a month has hundreds of segments, and nothing is compacted or
deleted. Segments sort without clocks, by `g<order>-<ordinal>-<writer>-<segment>.jsonl`: the order that the writer was
given (the generation of workers, say), behind the writers of that order that were there before it, its own in turn.
Logs of older versions, a part for each flush named by the clock, are read too; they sort first.

`append` never fails because of storage. Lines wait in memory, `MOST_WAITING_BYTES` at most; beyond that the oldest are
dropped, and the log says so as soon as it can be written again. `read` gives the same lines from any store: a line that
a killed writer left half-written is left out, and one that was written twice is read once, as whoever takes over from
a writer that is gone appends what it may not have written (`JsonLog.unwritten`).
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
"""The log whose records are events. Only here readers see the note of lines that were dropped."""
FLUSH_SECONDS = 5.0
"""Between two writes of a log to an object store."""
SEGMENT_BYTES = 1 << 20
"""A segment that is this long is not written again. Twice as much halves the objects and doubles what is sent."""
BESIDE = 999_999_999_999
"""Order of a writer that belongs to no generation and has few lines: an evaluator, an agent."""
MOST_WAITING_BYTES = 16 << 20
"""Of lines that storage does not take; hours of a run's metrics."""
RETRY_SECONDS = 1.0
"""A local file that could not be written is tried again after this long."""
CLOSE_SECONDS = 0.5
"""The last write has this long before whoever closes the log goes on; a store that is well takes less."""
DROPPED = "log_dropped"
"""Kind of the record that says how many lines are missing before it."""
_BLOCK_BYTES = 256 << 10
_READS_AT_ONCE = 8


class JsonLog:
    """Writer of one log; thread-safe. Several writers may append to the same log.

    Args:
        store: the run's store.
        key: name of the log, such as "metrics.jsonl".
        flush_seconds: on an object store, collect lines for this long before writing.
        order: on an object store, these lines are read behind those of writers with a lower number.
        alone: do not look for earlier writers of the same order (a request to list): their lines need no order.
    """

    def __init__(self, store: Store, key: str, flush_seconds: float = FLUSH_SECONDS, *, order: int = 0,
                 alone: bool = False) -> None:
        self._key, self._flush_seconds = key, flush_seconds
        path = store.local_path(key)
        self._local = path is not None
        self._sink: _File | _Segments = _File(path) if path is not None else _Segments(store, key, order, alone)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes, self._dropped = 0, 0
        self._sending: list[bytes] = []  # a try that failed, which may have arrived nevertheless
        self._last_flush = time.monotonic()
        self._failed_at: float | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Add one line; never fails because of storage.

        Local logs are written at once, remote ones soon, by a thread: nobody waits for the store.
        """
        self._append(json.dumps(record, separators=(",", ":"), default=_plain).encode() + b"\n")

    def unwritten(self) -> list[str]:
        """Lines that are in this process only."""
        with self._lock:
            return [line.decode() for line in (*self._sending, *self._waiting)]

    @property
    def is_written(self) -> bool:
        """Whether all lines have been written out."""
        with self._lock:
            return not self._sending and not self._waiting

    def restore(self, lines: Sequence[str]) -> None:
        """Append the `unwritten` lines of another writer, which may have written some of them since."""
        for line in lines:
            self._append(line.encode())

    def flush_due(self) -> None:
        """`flush_soon`, if the last flush is long enough ago."""
        if time.monotonic() - self._last_flush >= self._flush_seconds:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Begin to write out what has been collected, and do not wait. While the store fails, lines are kept."""
        with self._lock:
            if not (self._waiting or self._sending) or (self._thread is not None and self._thread.is_alive()):
                return
            self._last_flush = time.monotonic()
            if not self._local:
                self._thread = threading.Thread(target=self._try, name=f"log {self._key}", daemon=True)
                self._thread.start()
                return
        self._try()

    def flush(self) -> None:
        """Write out what has been collected.

        Raises:
            StorageError: the store fails; the lines are kept.
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
        """The last call: write out what has been collected. A store that fails or is slow is not waited for, but tried
        in the background as long as the process lives."""
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
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._waiting_bytes > MOST_WAITING_BYTES:
                self._waiting_bytes -= len(self._waiting.popleft())
                self._dropped += 1
        if not self._local:
            self.flush_due()
        elif self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._try()

    def _next(self) -> list[bytes]:
        """What to write now: the try that failed, else as many of the waiting lines as there is room for."""
        with self._lock:
            if self._sending:
                return self._sending
            if self._dropped:
                self._sending.append(self._note())
                self._dropped = 0
            room = self._sink.room()
            while self._waiting and room > 0:
                line = self._waiting.popleft()
                self._waiting_bytes -= len(line)
                room -= len(line)
                self._sending.append(line)
            return self._sending

    def _note(self) -> bytes:
        record = {"time": time.time(), "kind": DROPPED, "detail": {"log": self._key, "lines": self._dropped}}
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"

    def _try(self) -> None:
        # the store may be back at the next one; who must know calls `flush`
        with contextlib.suppress(StorageError, OSError):
            self.flush()


class _File:
    """A local file, appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made, self._whole = False, False

    def room(self) -> int:
        return SEGMENT_BYTES

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines in one call, so that those of several writers never interleave."""
        data = b"".join(lines)
        try:
            if not self._made:  # once: a folder that went away later may be a disk that comes back
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._made = True
            if not self._whole and self._is_torn():
                data = b"\n" + data  # else the first record would join what a killed writer left, and go with it
            self._whole = False
            with self._path.open("ab", buffering=0) as sink:
                written = sink.write(data)
        except OSError as error:
            raise StorageError(f"cannot write the log: {error.strerror}", where=str(self._path),
                               fix="check free space, and that the folder is there and can be written to") from None
        if written != len(data):
            raise StorageError("cannot write the log: no space left", where=str(self._path), fix="free some space")
        self._whole = True

    def _is_torn(self) -> bool:
        """Whether the file ends in the middle of a line."""
        try:
            with self._path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(size - 1, 0))
                return stream.read(1) not in (b"", b"\n")
        except FileNotFoundError:
            return False


class _Segments:
    """Objects, of which the newest is put again with what is new."""

    def __init__(self, store: Store, key: str, order: int, alone: bool) -> None:
        self._store, self._key = store, key
        self._order, self._writer = f"g{order:012d}-", uuid.uuid4().hex[:8]
        self._ordinal: int | None = 0 if alone else None
        self._number = 0
        self._held = b""
        """What the newest segment holds."""
        self._ends = False

    def room(self) -> int:
        return SEGMENT_BYTES - len(self._held)

    def write(self, lines: Sequence[bytes]) -> None:
        """Put the newest segment with these lines; after a failure, to be called with the same ones."""
        if self._ordinal is None:
            self._ordinal = self._behind_the_others()
        name = f"{self._order}{self._ordinal:06d}-{self._writer}-{self._number:06d}.jsonl"
        content = self._held + b"".join(lines)
        try:
            self._store.write(f"{self._key}/{name}", content)
        except BaseException:
            # It may arrive yet, late: then the segment must not have grown meanwhile.
            self._ends = True
            raise
        self._held = content
        if self._ends or len(content) >= SEGMENT_BYTES:
            self._held, self._ends = b"", False
            self._number += 1

    def _behind_the_others(self) -> int:
        """Number behind those of the writers of this order that are there."""
        entries = self._store.list_named(self._key, self._order)
        taken = [entry.key.rpartition("/")[2].split("-")[1] for entry in entries]
        return max((int(ordinal) for ordinal in taken), default=-1) + 1


def read(store: Store, key: str, *, with_dropped: bool = False) -> list[dict[str, Any]]:
    """All records of a log, oldest first; [] when there is no log.

    Args:
        with_dropped: also return the notes of dropped lines (`DROPPED`), which only `EVENTS` shows by itself.
    """
    if store.local_path(key) is not None:
        raw = store.read(key) if store.exists(key) else b""
    else:
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:  # a request each: latency is what counts
            raw = b"".join(pool.map(lambda entry: store.read(entry.key), store.list(key)))
    return list(_records(dict.fromkeys(raw.split(b"\n")), with_dropped or key == EVENTS))


def newest_first(store: Store, key: str) -> Iterator[dict[str, Any]]:
    """Records of a log from its end, read as they are asked for; a line that was written twice may come twice.

    On an object store the newest records take a listing and one request.
    """
    if store.local_path(key) is not None:
        if store.exists(key):
            with store.open(key) as stream:
                yield from _records(_backwards(stream), key == EVENTS)
        return
    for names in (lambda: store.list_named(key, "g"), lambda: _named_by_the_clock(store, key)):
        for content in _contents(store, [entry.key for entry in reversed(names())]):
            yield from _records(reversed(content.split(b"\n")), key == EVENTS)


def _named_by_the_clock(store: Store, key: str) -> Sequence[Any]:
    """Parts of an older version, which has one for each flush: listed only if the segments do not suffice."""
    return [entry for entry in store.list(key) if not entry.key.startswith(f"{key}/g")]


def _contents(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """Contents of objects: of the first, then of more and more at once."""
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        at, count = 0, 1
        while at < len(keys):
            yield from pool.map(store.read, keys[at:at + count])
            at += count
            count = min(2 * count, _READS_AT_ONCE)


def _backwards(stream: BinaryIO) -> Iterator[bytes]:
    """Lines of a file, the last first."""
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
        except ValueError:  # empty, or torn by a kill; the audit of a run notices a record that is missing
            continue
        if isinstance(record, dict) and (record.get("kind") != DROPPED or with_dropped):
            yield record


def _plain(value: Any) -> Any:
    """JSON value of what json does not know: numbers of numpy and torch as numbers, the rest as text."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)
