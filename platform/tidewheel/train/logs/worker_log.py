"""A worker's log: from the file of its process to the run's logs/ and to Ray's log folder.

`logging_process` redirects log records, and on a cluster everything that the process prints, to a file on the node
(`output`). A thread reads its lines, adds time and position, removes secrets, and writes them to the run's
logs/workers/ and to a file in Ray's log folder. Training waits for neither. While the store is unavailable, up to
`jsonlog.MAX_PENDING_BYTES` of lines wait in memory and on the node, and the log says how many were dropped.

A process that is killed leaves its file behind. Another worker of its node passes on the content, or the next worker
there, or a task that the driver sends at the end (`pass_on_abandoned`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tidewheel import jsonlog
from tidewheel.errors import StorageError
from tidewheel.jsonlog import JsonLog
from tidewheel.private_folders import make_private
from tidewheel.storage import Store
from tidewheel.train.logs.config import LogsConfig
from tidewheel.train.logs.line import HERE, PRINTED, LogLine, Redactor
from tidewheel.train.logs.output import (
    STATE,
    OutputFile,
    Reader,
    RecordHandler,
    State,
    abandoned,
    remove,
    written_at,
)
from tidewheel.train.node_log import OLD_SECONDS, node_folder

WORKERS = "logs/workers"
"""Folder of a run with a log of each worker process."""
CONTROL = "logs/control"
"""Folder of a run with a log of each process that has a role instead of a rank: coordinator, agents, evaluator."""
SECONDS = 15.0
"""Between two writes of a process's log to an object store; on a folder, lines are written at once."""
POLL_SECONDS = 0.1
"""Interval of the search for new lines."""
ABANDONED_SECONDS = 10.0
"""Interval of the search for files of killed processes."""
CLOSE_SECONDS = 5.0
"""A worker that ends waits this long for its last lines to be written. Another process passes on the rest."""
LAST_WORDS_SECONDS = 1.0
QUIET = ("botocore", "boto3", "s3transfer", "s3fs", "fsspec", "aiobotocore", "urllib3", "asyncio", "filelock",
         "matplotlib", "numba")
"""Verbose libraries, which log request signatures at level debug; only their warnings and errors are logged."""

logger = logging.getLogger(__name__)
_running: list[WorkerLog] = []


class WorkerLog:
    """The log of this process; see `logging_process`.

    Args:
        store: the run's store.
        folder: folder of this node for the process's output file.
        state: how much of the output file was passed on, and where to.
        capture: also redirect what the process prints to the file.
    """

    def __init__(self, store: Store, folder: Path, state: State, *, capture: bool) -> None:
        self._store = store
        self._folder = folder
        self._output = OutputFile(folder, state)
        self.handler = RecordHandler(self._output.descriptor)
        self._redact = Redactor()
        self._reader = Reader(self._output.descriptor, state, self._redact)
        self._log = JsonLog(store, state.key, SECONDS, alone=True)
        self._file = _opened(state.file)
        self._terminal = self._output.capture() if capture else None
        self._ended = threading.Event()
        self._passing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log of the worker", daemon=True)
        self._thread.start()

    def flush(self, seconds: float) -> None:
        """Pass on all lines, and wait for the store for at most `seconds`."""
        until = time.monotonic() + seconds
        self._pass_on()
        self._log.flush_soon()
        while not self._log.is_written and time.monotonic() < until:
            time.sleep(0.01)
        self._pass_on()

    def close(self) -> None:
        """Write the last lines. Leave to another process what the store does not take within `CLOSE_SECONDS`."""
        if self._terminal is not None:
            self._output.release()
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)
        self._pass_on(last=True)
        self.flush(CLOSE_SECONDS)
        written = self._log.is_written
        if written:
            _pass_on_abandoned(self._store, self._folder)
        if self._file is not None:
            self._file.close()
        self._output.close(remove=written)

    def _run(self) -> None:
        looked = 0.0
        while not self._ended.wait(POLL_SECONDS):
            try:
                self._pass_on()
                self._log.flush_due()
                if time.monotonic() - looked >= ABANDONED_SECONDS:
                    looked = time.monotonic()
                    _pass_on_abandoned(self._store, self._folder)
            except Exception:  # a full disk, a missing folder: the file keeps the lines, and the next round retries
                time.sleep(1.0)

    def _pass_on(self, *, last: bool = False) -> None:
        """Read new lines and write them to the run's log, the file and the terminal."""
        with self._passing:
            while lines := self._reader.read(time.time(), replace(HERE), last=last):
                for line in lines:
                    self._log.append(line.as_json())
                _write(self._file, lines, self._output.state.style)
                self._show(lines)
            kept = max(self._output.state.offset, self._reader.offset - jsonlog.MAX_PENDING_BYTES)
            self._output.advance(self._reader.offset if self._log.is_written else kept)

    def _show(self, lines: list[LogLine]) -> None:
        """Write to the old standard error the lines that would have gone there without this log."""
        if self._terminal is None:
            return
        shown = [line.text for line in lines if line.logger == PRINTED or line.level not in ("debug", "info")]
        with contextlib.suppress(OSError):  # no process reads it any longer
            os.write(self._terminal, "".join(f"{text}\n" for text in shown).encode())


@contextlib.contextmanager
def logging_process(config: LogsConfig, store: Store, *, run: str, node: str, capture: bool,
                    beside: Path | None = None, role: str = "") -> Iterator[None]:
    """Keep the log of this process in the run's folder while the block runs.

    It does nothing if this process has a log already, or if the node has no private folder for the process's file. Then
    the output of the process goes where it went before.

    Args:
        config: level and format.
        store: the run's folder.
        run: id of the run.
        node: name of the machine.
        capture: also keep what the process prints.
        beside: Ray's log folder, for a file with the same lines; None for no such file.
        role: "coordinator", "agent" or "evaluator"; "" for a worker, which has a rank.
    """
    folder = node_folder(store, WORKERS)
    if _running or not (make_private(folder.parent, secret=True) and make_private(folder, secret=True)):
        yield
        return
    process = f"{int(time.time())}-{re.sub(r'[^A-Za-z0-9.-]+', '_', node)}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    if role:
        process = f"{role}-{process}"
    file = "" if beside is None else str(beside / f"tidewheel-{run}-{process}.log")
    HERE.run = run
    HERE.role = role
    key = f"{CONTROL if role else WORKERS}/{process}.jsonl"
    state = State(key, process, config.format, file, position=replace(HERE))
    log = WorkerLog(store, folder, state, capture=capture)
    _running.append(log)
    try:
        with _handling(log.handler, config.level, capture=capture):
            yield
    finally:
        _running.remove(log)
        log.close()
        HERE.role = ""


def last_words() -> None:
    """Write the log of this process before it ends itself; wait for at most `LAST_WORDS_SECONDS`.

    The rest stays in the process's file, for another process.
    """
    for log in list(_running):
        writing = threading.Thread(target=log.flush, args=(LAST_WORDS_SECONDS,), name="last words", daemon=True)
        writing.start()
        writing.join(LAST_WORDS_SECONDS)


def pass_on_abandoned(store: Store) -> int:
    """Write the rest of the output of this node's killed workers to the run's logs/; return their number."""
    folder = node_folder(store, WORKERS)
    return _pass_on_abandoned(store, folder) if folder.is_dir() else 0


@contextlib.contextmanager
def _handling(handler: logging.Handler, level: str, *, capture: bool) -> Iterator[None]:
    """Pass all records of `level` or above to a handler during the block.

    With `capture`, remove handlers that print records meanwhile: a printed record would be logged twice.
    """
    root = logging.getLogger()
    quiet = [logging.getLogger(name) for name in QUIET]
    levels = [(changed, changed.level) for changed in (root, *quiet)]
    printing = [other for other in root.handlers if _prints(other)] if capture else []
    for other in printing:
        root.removeHandler(other)
    handler.setLevel(level.upper())  # some libraries' loggers have a level of their own
    root.addHandler(handler)
    root.setLevel(level.upper())
    for verbose in quiet:
        verbose.setLevel(max(verbose.level, logging.WARNING))
    try:
        yield
    finally:
        root.removeHandler(handler)
        for other in printing:
            root.addHandler(other)
        for changed, before in levels:
            changed.setLevel(before)


def _prints(handler: logging.Handler) -> bool:
    """Return whether a handler writes to standard output or standard error, as Ray's do in its workers."""
    if not isinstance(handler, logging.StreamHandler):
        return False
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream without a descriptor
        return handler.stream.fileno() in (1, 2)
    return False


def _pass_on_abandoned(store: Store, folder: Path) -> int:
    count = 0
    for path in sorted(folder.glob(f"*{STATE}")):
        with abandoned(path) as output:
            if output is None:
                continue
            descriptor, state = output
            if _is_of_this_run(store, descriptor):
                lines = _rest(descriptor, state)
                log = JsonLog(store, state.key, order=1)  # behind what the process itself wrote
                for line in lines:
                    log.append(line.as_json())
                try:
                    log.flush()
                except (StorageError, OSError):
                    continue  # the file stays for the next round
                _append(state, lines)
                count += 1
            remove(path)
    return count


def _rest(descriptor: int, state: State) -> list[LogLine]:
    """Return the lines that a killed process has not passed on."""
    reader, lines = Reader(descriptor, state, Redactor()), list[LogLine]()
    when = written_at(descriptor)
    while more := reader.read(when, last=True):
        lines += more
    return lines


def _is_of_this_run(store: Store, descriptor: int) -> bool:
    """Return whether a file belongs to this run, and not to a deleted run that had the same folder."""
    written = written_at(descriptor)
    if written > time.time() - OLD_SECONDS:
        return True
    with contextlib.suppress(FileNotFoundError):
        return written > float(store.read_json("run.json")["started"]) - OLD_SECONDS
    return False


def _append(state: State, lines: list[LogLine]) -> None:
    """Add the last lines of a killed process to its file in Ray's log folder."""
    file = _opened(state.file)
    if file is not None:
        _write(file, lines, state.style)
        file.close()


def _opened(path: str) -> BinaryIO | None:
    """Return the file opened to append to; None without one, or where it cannot be written."""
    with contextlib.suppress(OSError):
        return open(path, "ab", buffering=0) if path else None
    return None


def _write(file: BinaryIO | None, lines: list[LogLine], style: str) -> None:
    if file is None:
        return
    with contextlib.suppress(OSError):  # the disk is full; the run's logs/ has the same lines
        file.write("".join(f"{line.shown(style)}\n" for line in lines).encode())
