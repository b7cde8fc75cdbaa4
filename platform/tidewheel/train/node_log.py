"""One writer per node for a log that every rank adds lines to: the ledger on an object store.

Ranks hand their lines over as small, atomically written files in a folder of the node. The first rank to lock the
folder uploads all files once in `SECONDS` and then deletes them. When its process ends, the lock is free for another
rank. The next uploader also takes the files of dead ranks; a line that is uploaded twice is read once. If the folder
cannot be used, each rank writes for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tidewheel.errors import StorageError
from tidewheel.jsonlog import CLOSE_SECONDS, DROPPED, MAX_PENDING_BYTES, SEGMENT_BYTES, JsonLog
from tidewheel.private_folders import make_private
from tidewheel.storage import Store

SECONDS = 60.0
"""Between two uploads of a node."""
LOCK_SECONDS = 10.0
"""The last upload waits this long for another rank's upload."""
OLD_SECONDS = 3600.0
"""Files left this long before the run started belong to a deleted run of the same name."""
_LOCK = "uploader"
_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class NodeLog:
    """One rank's writer. One thread appends; another uploads.

    Args:
        store: the run's store.
        key: name of the log.
        generation: number of the group of workers.
        rank: of this worker.
        folder: shared by the ranks of this node; default: one of this user and run in the temporary folder.
    """

    def __init__(self, store: Store, key: str, *, generation: int, rank: int, folder: Path | None = None) -> None:
        self._store, self._key = store, key
        self._log = JsonLog(store, key, math.inf, order=generation, alone=True)
        self._name = f"{generation:012d}-{rank:06d}-{os.getpid()}"
        self._numbers = itertools.count()
        self._waiting: list[str] = []
        self._handed: deque[tuple[Path, int, int]] = deque()  # files, their bytes and lines: not all are there any more
        self._handed_bytes, self._dropped = 0, 0
        self._folder = _usable(folder or node_folder(store, key))
        self._lock: BinaryIO | None = None
        self._uploading = threading.Lock()
        self._uploaded = time.monotonic()
        self._thread: threading.Thread | None = None
        self._taken: list[Path] = []  # files whose lines are in `_log`
        self._began = time.time()

    def append(self, record: dict[str, Any]) -> None:
        """Add one line."""
        self._waiting.append(json.dumps(record, separators=(",", ":")) + "\n")

    def flush_soon(self) -> None:
        """Hand over collected lines, and start an upload if one is due and this rank uploads; does not wait for it."""
        self._hand_over()
        if time.monotonic() - self._uploaded >= SECONDS and self._is_first():
            self._begin_upload()

    def flush(self) -> None:
        """Hand over collected lines, and upload the node's files if this rank uploads.

        Raises:
            StorageError: the store fails; the lines are kept.
        """
        self._hand_over()
        if self._is_first():
            self._upload()

    def finish(self) -> None:
        """Hand over collected lines at the end of the run, and wait until this rank or another has uploaded them.

        Raises:
            StorageError: the store fails.
        """
        self._hand_over()
        until = time.monotonic() + LOCK_SECONDS
        while not self._is_first() and any(path.exists() for path, _, _ in self._handed) and time.monotonic() < until:
            time.sleep(0.02)
        self._upload()

    def close(self) -> None:
        """Hand over collected lines and leave uploads to another rank, without waiting for a slow store."""
        self._hand_over()
        if self._is_first():
            self._begin_upload().join(CLOSE_SECONDS)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- handing over ----------------------------------------------------------------------------------
    def _hand_over(self) -> None:
        if self._dropped:
            detail = {"log": self._key, "lines": self._dropped}
            self._waiting.insert(0, json.dumps({"time": time.time(), "kind": DROPPED, "detail": detail}) + "\n")
            self._dropped = 0
        if not self._waiting:
            return
        lines, self._waiting = self._waiting, []
        if self._folder is None or not self._leave(self._folder, lines):
            self._log.restore(lines)

    def _leave(self, folder: Path, lines: list[str]) -> bool:
        """Write lines to a file in the folder; return False if that fails."""
        name = f"{self._name}-{next(self._numbers):08d}.jsonl"
        data = "".join(lines).encode()
        try:
            (folder / f".{name}").write_bytes(data)
            (folder / f".{name}").rename(folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                (folder / f".{name}").unlink()
            return False
        self._handed.append((folder / name, len(data), len(lines)))
        self._handed_bytes += len(data)
        while self._handed_bytes > MAX_PENDING_BYTES:
            self._forget_oldest()
        return True

    def _forget_oldest(self) -> None:
        """Drop the oldest file. It was uploaded long ago, or could not be for long."""
        path, size, lines = self._handed.popleft()
        self._handed_bytes -= size
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            self._dropped += lines

    # -- uploading -------------------------------------------------------------------------------------
    def _is_first(self) -> bool:
        """Return whether this rank uploads for the node: it has the lock, or gets it now."""
        if self._folder is None or self._lock is not None:
            return True
        lock: BinaryIO | None = None
        try:
            lock = (self._folder / _LOCK).open("ab")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another's
            if lock is not None:
                lock.close()
            return False
        self._lock = lock
        return True

    def _begin_upload(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._try, name=f"log {self._key}", daemon=True)
            self._thread.start()
        return self._thread

    def _try(self) -> None:
        with contextlib.suppress(StorageError, OSError):  # the store may be back at the next one
            self._upload()

    def _upload(self) -> None:
        with self._uploading:
            self._uploaded = time.monotonic()
            self._send()  # this rank's own lines, and those of a failed upload
            if self._folder is None or self._lock is None:
                return
            files = sorted(path for path in self._folder.iterdir() if path.suffix == ".jsonl" and path.name[0] != ".")
            for group in _groups(files):
                self._taken = group
                for path in group:
                    if self._is_of_this_run(path):
                        self._log.restore(_content(path).splitlines(keepends=True))
                self._send()

    def _send(self) -> None:
        self._log.flush()
        for path in self._taken:
            path.unlink(missing_ok=True)
        self._taken = []

    def _is_of_this_run(self, path: Path) -> bool:
        """Return whether a file belongs to this run, and not to a deleted run of the same name."""
        with contextlib.suppress(FileNotFoundError):
            written = path.stat().st_mtime
            if written > self._began - OLD_SECONDS:
                return True
            return written > float(self._store.read_json("run.json")["started"]) - OLD_SECONDS
        return False


def node_folder(store: Store, key: str) -> Path:
    """Return the folder that the ranks of this node share for a log of this user's run."""
    endpoint = next((os.environ[name] for name in _ENDPOINT if os.environ.get(name)), "")
    run = hashlib.sha256("\0".join((endpoint, store.uri, key)).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"tidewheel-logs-{os.getuid()}", run)


def _usable(folder: Path) -> Path | None:
    """Return the folder if it and its parent belong to this user alone; create them if necessary."""
    usable = make_private(folder.parent, secret=True) and make_private(folder, secret=True)
    return folder if usable else None


def _groups(files: list[Path]) -> Iterator[list[Path]]:
    """Yield the files in groups of about a segment."""
    group: list[Path] = []
    size = 0
    for path in files:
        group.append(path)
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
        if size >= SEGMENT_BYTES:
            yield group
            group = []
            size = 0
    yield group


def _content(path: Path) -> str:
    """Return the content of a file, "" if another rank has uploaded it meanwhile."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
