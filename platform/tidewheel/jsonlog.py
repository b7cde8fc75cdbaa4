"""Append-only JSON lines that survive restarts, on any store.

On a local folder a log is one file, appended to. Objects cannot be appended to, so on an object
store the log `metrics.jsonl` is a folder of immutable parts, `metrics.jsonl/<time>-<writer>.jsonl`, one per
flush; their names sort by time. `read` gives the same lines either way. A half-written last line (the
writer was killed) is left out.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import Any

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
        self._lock = threading.Lock()
        self._writer = uuid.uuid4().hex[:8]
        self._parts = 0
        self._path = store.local_path(key)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Local logs are written at once, remote ones at the next flush."""
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            if self._path is not None:
                with self._path.open("ab", buffering=0) as sink:  # one write call: lines never interleave
                    sink.write(line)
                return
            self._lines.append(line)
            due = time.monotonic() - self._last_flush >= self._flush_seconds
        if due:
            self.flush()

    def flush(self) -> None:
        """Write out what has been collected."""
        with self._lock:
            lines, self._lines = self._lines, []
            self._last_flush = time.monotonic()
            self._parts += 1
            part = f"{time.time_ns():020d}-{self._writer}-{self._parts:06d}.jsonl"
        if lines:
            self._store.write(f"{self._key}/{part}", b"".join(lines))


def read(store: Store, key: str) -> list[dict[str, Any]]:
    """All records of a log, oldest first; [] when there is no log."""
    if store.local_path(key) is not None:
        raw = store.read(key) if store.exists(key) else b""
    else:
        raw = b"".join(store.read(entry.key) for entry in store.list(key))
    records = []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1 and not _torn(line):
                raise
    return records


def _torn(line: bytes) -> bool:
    """A line cut off by a kill does not end in a brace; the next writer began right after it."""
    return not line.rstrip().endswith(b"}") or line.count(b"{") != line.count(b"}")
