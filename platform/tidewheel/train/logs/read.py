"""The logs of a run's processes, read and merged by time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tidewheel import jsonlog
from tidewheel.errors import ConfigError
from tidewheel.storage import Stamp, Store
from tidewheel.train.logs.config import LEVELS
from tidewheel.train.logs.line import LogLine
from tidewheel.train.logs.worker_log import CONTROL, WORKERS

_READS_AT_ONCE = 8
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class LineFilter:
    """Which lines to show.

    Args:
        rank: only lines of this rank; None: of all ranks, and of processes with a role.
        generation: only lines of this generation of workers; None: of all.
        since: only lines from this Unix time on.
        level: only lines of this level or above.
    """

    rank: int | None = None
    generation: int | None = None
    since: float = 0.0
    level: str = "debug"

    def matches(self, line: LogLine) -> bool:
        """Return whether to show a line."""
        has_rank = self.rank is None or (self.rank == line.rank and not line.role)
        return (has_rank and self.generation in (None, line.generation)
                and line.time >= self.since and _importance(line.level) >= _importance(self.level))


class RunLogs:
    """The logs of one run. `new` may be called again while the run goes on, and reads only what was added since."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._offsets: dict[str, int] = {}  # bytes read of each file, or of each object on an object store
        self._sizes: dict[str, int] = {}  # as last listed: more than was read where the last line is not whole
        self._last: dict[str, LogLine] = {}  # newest line of each process
        self._shown: set[tuple[str, int]] = set()
        self.ranks: set[int] = set()
        """Ranks of all lines read so far, shown or not."""
        self.generations: set[int] = set()
        """Generations of all lines read so far, shown or not."""

    def new(self, selection: LineFilter) -> list[LogLine]:
        """Return the matching lines that no earlier call returned, by time.

        Raises:
            StorageError: the logs cannot be read.
        """
        entries = [*self._store.list(WORKERS), *self._store.list(CONTROL)]
        grown = [entry for entry in entries if entry.bytes != self._sizes.get(entry.key)]
        lines: list[LogLine] = []
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:  # each read is a request or more: latency dominates
            for entry, content in zip(grown, pool.map(self._read, grown)):
                new_lines = self._new_lines(content, _process(entry.key))
                lines += [line for line in new_lines if selection.matches(line)]
        return sorted(lines, key=lambda line: (line.time, line.process, line.at))

    @property
    def is_empty(self) -> bool:
        """Whether no process has a log so far."""
        return not self._sizes

    def _read(self, entry: Stamp) -> bytes:
        """Return the whole lines that were added to a file or object since the last look."""
        known = self._offsets.get(entry.key, 0)
        offset = known if entry.bytes >= known else 0  # a shorter file was rewritten
        content = self._store.read(entry.key, offset, entry.bytes - offset)
        content = content[:content.rfind(b"\n") + 1]
        self._offsets[entry.key] = offset + len(content)
        self._sizes[entry.key] = entry.bytes
        return content

    def _new_lines(self, content: bytes, process: str) -> Iterator[LogLine]:
        """Yield the lines of one process that are new; a note of dropped lines becomes a line itself."""
        for record in _records(content):
            if record.get("kind") == jsonlog.DROPPED:
                line = _note(record, self._last.get(process), process)
            else:
                try:
                    line = LogLine.of_json(record)
                except (KeyError, TypeError, ValueError):  # damaged, or of a later version
                    continue
                self._last[process] = line
            if not line.role:
                self.ranks.add(line.rank)
                self.generations.add(line.generation)
            if (line.process, line.at) not in self._shown:  # two processes may have passed on the same line
                self._shown.add((line.process, line.at))
                yield line


def parse_since(text: str, now: float | None = None) -> float:
    """Return the Unix time that `--since` names: 2026-11-23T02:25, 02:25 of today, or 90s, 10m, 2h, 3d ago.

    Raises:
        ConfigError: it is none of these.
    """
    now = time.time() if now is None else now
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if ago:
        return now - float(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
        text = f"{datetime.fromtimestamp(now).date().isoformat()}T{text.rjust(5, '0')}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{text!r} is not a time", where="--since",
                          fix="give 10m (ten minutes ago; s, h and d too), 14:30, 2026-11-23T14:30, or "
                              "2026-11-23T14:30Z for UTC") from None


def _process(key: str) -> str:
    """Return the process that a file or object below `WORKERS` or `CONTROL` belongs to."""
    return key.removeprefix(f"{WORKERS}/").removeprefix(f"{CONTROL}/").partition("/")[0].removesuffix(".jsonl")


def _records(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # empty, or torn by a kill
            continue
        if isinstance(record, dict):
            yield record


def _note(record: dict[str, Any], last: LogLine | None, process: str) -> LogLine:
    """Return a line, behind the last one that is there, that says how many are missing."""
    text = f"{record['detail']['lines']} lines are missing here: storage was unavailable and the buffer was full"
    at = -1 - int(record["time"] * 1000)  # unique, and the offset of no line in the process's output
    if last is None:
        return LogLine(float(record["time"]), "warning", "", 0, 0, 0, __name__, text, process, at)
    return replace(last, time=last.time + 1e-6, level="warning", logger=__name__, text=text, at=at)


def _importance(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
