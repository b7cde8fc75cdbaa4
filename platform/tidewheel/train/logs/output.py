"""The file on a node that receives a worker process's output.

Log records and everything that the process prints, including native code, are appended to one file in a private folder
of the node. Its content survives the process, and writing to it never waits for a store. A thread of the process, or
another process after its death, reads the file and passes its lines on (`worker_log`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tidewheel.private_folders import create_file, create_locked, open_file
from tidewheel.train.logs.line import HERE, PRINTED, LogLine, Position, Redactor

LONGEST_LINE = 64 << 10
"""Bytes. Longer lines are cut into several."""
LONGEST_RECORD = 10_000
"""Characters of a log record's text, so that its JSON is shorter than LONGEST_LINE."""
FREE_BYTES = 1 << 20
"""Least bytes of disk space to give back at once."""
_MARK = b"\x1e"
"""Begins a log record in the file; the rest of its line is JSON."""
_STATE_BYTES = 4096
_STREAMS = (1, 2)
_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
RAW, STATE = ".raw", ".state"


@dataclass(frozen=True)
class State:
    """State that another process needs to continue with the file of a process that was killed."""

    key: str
    """Key of the run's log that receives the lines."""
    process: str
    style: str
    """"text" or "json", of the lines in `file`."""
    file: str = ""
    """Another file that receives the lines; "" for none."""
    offset: int = 0
    """Everything before this offset is in the run's log."""
    position: Position = field(default_factory=Position)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> State:
        """Return the state that was written as JSON."""
        return cls(**{**values, "position": Position(**values["position"])})


class OutputFile:
    """The file of one process.

    Args:
        folder: private folder of the node.
        state: of the process, which names the files.
    """

    def __init__(self, folder: Path, state: State) -> None:
        self.path = folder / f"{state.process}{RAW}"
        self._state_path = folder / f"{state.process}{STATE}"
        os.close(create_file(self.path))
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self._lock = create_locked(self._state_path)
        self._before: dict[int, int] = {}
        self._freed = 0
        self.save(state)

    def save(self, state: State) -> None:
        """Record how far the file has been passed on."""
        content = json.dumps(asdict(state)).encode()
        os.pwrite(self._lock, content.ljust(_STATE_BYTES), 0)
        self.state = state

    def advance(self, offset: int) -> None:
        """Record that all before `offset` has been passed on, and give its space back."""
        if offset > self.state.offset or self.state.position != HERE:
            self.save(replace(self.state, offset=offset, position=replace(HERE)))
        if offset - self._freed >= FREE_BYTES:
            _free(self.descriptor, offset)
            self._freed = offset

    def capture(self) -> int:
        """Redirect standard output and standard error to the file; return a descriptor of the old standard error."""
        _flush()
        for stream in _STREAMS:
            self._before[stream] = os.dup(stream)
            os.dup2(self.descriptor, stream)
        return self._before[2]

    def release(self) -> None:
        """Restore standard output and standard error."""
        _flush()
        for stream, before in self._before.items():
            os.dup2(before, stream)

    def close(self, *, remove: bool) -> None:
        """Close the file. Without `remove`, another process passes on the rest of it."""
        if remove:
            self.path.unlink(missing_ok=True)
            self._state_path.unlink(missing_ok=True)
        for descriptor in (self.descriptor, self._lock, *self._before.values()):
            os.close(descriptor)


class RecordHandler(logging.Handler):
    """Appends log records to the file of the process."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._format = logging.Formatter("%(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record with the position of this process."""
        try:
            values = {"time": record.created, "level": record.levelname.lower(), "logger": record.name,
                      "text": self._format.format(record)[:LONGEST_RECORD], **asdict(HERE)}
            os.write(self._descriptor, _MARK + json.dumps(values).encode() + b"\n")  # whole: one call, O_APPEND
        except Exception:
            self.handleError(record)


class Reader:
    """Reads the lines of a process's file, from an offset on.

    Args:
        descriptor: of the file.
        state: of the process; says how far the file was read before.
        redact: removes secrets.
    """

    def __init__(self, descriptor: int, state: State, redact: Redactor) -> None:
        self._descriptor, self._state, self._redact = descriptor, state, redact
        self.offset = state.offset
        """All lines before it have been read."""
        self._position = state.position
        self._newest = 0.0  # time of the last line that was read

    def read(self, now: float, position: Position | None = None, *, last: bool = False) -> list[LogLine]:
        """Return the next lines, at most about 1 MB of them; [] when there are no more.

        Args:
            now: time of lines that were printed.
            position: of the process, for lines that were printed; None: as the record before them says.
            last: nothing will be added: take a line without an end too.
        """
        self._position = position or self._position
        data = os.pread(self._descriptor, 1 << 20, self.offset)
        if last and data and b"\n" not in data and len(data) < LONGEST_LINE:
            data += b"\n"
        lines: list[LogLine] = []
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin, begin + LONGEST_LINE)
            if end < 0 and len(data) - begin < LONGEST_LINE:
                break
            size = LONGEST_LINE if end < 0 else end + 1 - begin
            lines += self._parsed(data[begin:begin + size].rstrip(b"\r\n"), self.offset, now)
            begin += size
            self.offset += size
        return self._in_order(lines)

    def _in_order(self, lines: list[LogLine]) -> list[LogLine]:
        """Return lines with times in their order in the file: when a line was printed is known only roughly."""
        ordered: list[LogLine] = []
        later = math.inf
        for line in reversed(lines):
            later = min(later, line.time)
            ordered.append(line if line.time == later else replace(line, time=later))
        ordered.reverse()
        for index, line in enumerate(ordered):
            self._newest = max(self._newest, line.time)
            ordered[index] = line if line.time == self._newest else replace(line, time=self._newest)
        return ordered

    def _parsed(self, line: bytes, at: int, now: float) -> Iterator[LogLine]:
        """Yield what a line of the file holds: printed text, a record, or a record behind text without an end."""
        printed, mark, rest = line.partition(_MARK)
        values = _record(rest) if mark else None
        if values is None:
            printed = line
        if printed or values is None:
            text = self._redact(printed.decode("utf-8", "replace"))
            yield LogLine(now, "info", **asdict(self._position), logger=PRINTED, text=text, process=self._state.process,
                          at=at)
        if values is not None:
            record = LogLine.of_json({**values, "process": self._state.process, "at": at + len(printed)})
            self._position = Position(record.run, record.generation, record.rank, record.step, record.role)
            yield replace(record, text=self._redact(record.text))


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[tuple[int, State] | None]:
    """Lock the file of a process that was killed, given the path of its state; yield its descriptor and state.

    Yield None if the process is alive, or another process has the lock.
    """
    try:
        lock = open_file(path)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = State.of_json(json.loads(os.pread(lock, _STATE_BYTES, 0)))
        raw = open_file(path.with_suffix(RAW))
    except (OSError, ValueError, TypeError, KeyError):
        os.close(lock)
        yield None
        return
    try:
        yield raw, state
    finally:
        os.close(raw)
        os.close(lock)


def remove(path: Path) -> None:
    """Remove the files of a process that was killed, given the path of its state."""
    path.with_suffix(RAW).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def written_at(descriptor: int) -> float:
    """Return when a file was last written to, at most the time now."""
    return min(os.fstat(descriptor).st_mtime, time.time())


def _record(content: bytes) -> dict[str, Any] | None:
    """Return a record that `RecordHandler` wrote, None for other text."""
    try:
        values = json.loads(content)
        LogLine.of_json({**values, "process": "", "at": 0})
    except (ValueError, TypeError, KeyError):
        return None
    return dict(values)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there
            stream.flush()


def _free(descriptor: int, size: int) -> None:
    """Give back the disk space of the first `size` bytes; where the system cannot, the file only grows."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).fallocate(descriptor, _PUNCH_HOLE, ctypes.c_longlong(0), ctypes.c_longlong(size))
