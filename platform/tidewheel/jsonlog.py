"""Append-only JSON lines that survive restarts, on any store.

On a local folder a log is one file, appended to. Objects cannot be appended to, so on an object
store the log `metrics.jsonl` is a folder of immutable parts, `metrics.jsonl/<time>-<writer>.jsonl`, one per
flush; their names sort by time. `read` gives the same lines either way. A line that a killed writer left
half-written is left out, and one that was written twice is read once: whoever takes over from a writer that is gone
appends what it may not have written (`JsonLog.unwritten`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidewheel.errors import StorageError
from tidewheel.storage import Store


class JsonLog:
    """Writer of one log; thread-safe. Several writers may append to the same log.

    Args:
        store: the run's store.
        key: name of the log, such as "metrics.jsonl".
        flush_seconds: on an object store, collect lines for this long before writing a part.
    """

    def __init__(self, store: Store, key: str, flush_seconds: float = 5.0) -> None:
        self._store, self._key, self._flush_seconds = store, key, flush_seconds
        self._lines: list[bytes] = []
        self._last_flush = time.monotonic()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._writer = uuid.uuid4().hex[:8]
        self._parts = 0
        self._part: tuple[str, list[bytes]] | None = None  # a try that failed, which may have arrived nevertheless
        self._thread: threading.Thread | None = None
        self._path = store.local_path(key)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._end_torn_line()

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Local logs are written at once, remote ones soon, by a thread: nobody waits for the store."""
        self._append(json.dumps(record, separators=(",", ":"), default=_plain).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        with self._lock:
            if self._path is not None:
                with self._path.open("ab", buffering=0) as sink:  # one write call: lines never interleave
                    sink.write(line)
                return
            self._lines.append(line)
            due = time.monotonic() - self._last_flush >= self._flush_seconds
        if due:
            self.flush_soon()

    def unwritten(self) -> list[str]:
        """Lines that are in this process only."""
        with self._lock:
            lines = [*(self._part[1] if self._part is not None else ()), *self._lines]
        return [line.decode() for line in lines]

    def restore(self, lines: Sequence[str]) -> None:
        """Append the `unwritten` lines of another writer, which may have written some of them since."""
        for line in lines:
            self._append(line.encode())

    def flush_soon(self) -> None:
        """Begin to write out what has been collected, and do not wait. While the store fails, lines are kept."""
        with self._lock:
            if (self._thread is not None and self._thread.is_alive()) or not (self._lines or self._part):
                return
            self._last_flush = time.monotonic()
            self._thread = threading.Thread(target=self._try, name=f"log {self._key}", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Write out what has been collected. When the store fails, which is raised, the lines are kept."""
        with self._writing:  # two flushes could otherwise publish out of order
            while True:
                with self._lock:
                    self._last_flush = time.monotonic()
                    if self._part is None:
                        if not self._lines:
                            return
                        name = f"{time.time_ns():020d}-{self._writer}-{self._parts:06d}.jsonl"
                        self._part, self._lines = (name, self._lines), []
                        self._parts += 1
                name, lines = self._part
                self._store.write(f"{self._key}/{name}", b"".join(lines))
                self._part = None

    def _try(self) -> None:
        # the store may be back at the next one; who must know calls `flush`
        with contextlib.suppress(StorageError, OSError):
            self.flush()

    def _end_torn_line(self) -> None:
        """Begin on a fresh line: else the first record would join what a killed writer left, and go with it."""
        assert self._path is not None
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - 1, 0))
            torn = stream.read(1) not in (b"", b"\n")
        if torn:
            with self._path.open("ab", buffering=0) as sink:
                sink.write(b"\n")


def read(store: Store, key: str) -> list[dict[str, Any]]:
    """All records of a log, oldest first; [] when there is no log."""
    if store.local_path(key) is not None:
        raw = store.read(key) if store.exists(key) else b""
    else:
        with ThreadPoolExecutor(8) as pool:  # a request each: latency is what counts
            raw = b"".join(pool.map(lambda entry: store.read(entry.key), store.list(key)))
    records = []
    for line in dict.fromkeys(raw.split(b"\n")):
        try:
            record = json.loads(line)
        except ValueError:  # empty, or torn by a kill; the audit of a run notices a record that is missing
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _plain(value: Any) -> Any:
    """JSON value of what json does not know: numbers of numpy and torch as numbers, the rest as text."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)
