"""The logs of a run's workers, read and merged in the order of time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tidewheel import jsonlog
from tidewheel.errors import ConfigError
from tidewheel.storage import Store
from tidewheel.train.logs.config import LEVELS
from tidewheel.train.logs.line import LogLine
from tidewheel.train.logs.worker_log import WORKERS

_READS_AT_ONCE = 8
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Wanted:
    """Which lines to show.

    Args:
        rank: of this rank only; None: of all.
        generation: of this generation of workers only; None: of all.
        since: from this Unix time on.
        level: of this level or above.
    """

    rank: int | None = None
    generation: int | None = None
    since: float = 0.0
    level: str = "debug"

    def takes(self, line: LogLine) -> bool:
        """Return whether a line is wanted."""
        return (self.rank in (None, line.rank) and self.generation in (None, line.generation)
                and line.time >= self.since and _importance(line.level) >= _importance(self.level))


class RunLogs:
    """The logs of one run; `new` may be called again and again while the run goes on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sizes: dict[str, int] = {}
        self._shown: set[tuple[str, int]] = set()
        self.ranks: set[int] = set()
        """Ranks of all lines read so far, wanted or not."""
        self.generations: set[int] = set()

    def new(self, wanted: Wanted) -> list[LogLine]:
        """Return the wanted lines that no call before returned, in the order of time.

        Raises:
            StorageError: the logs cannot be read.
        """
        sizes = self._listed()
        grown = [key for key, size in sizes.items() if size != self._sizes.get(key)]
        self._sizes = sizes
        lines: list[LogLine] = []
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:  # a request or more each: latency is what counts
            for found in pool.map(self._read, grown):
                lines += [line for line in self._noted(found) if wanted.takes(line)]
        return sorted(lines, key=lambda line: (line.time, line.process, line.at))

    @property
    def is_empty(self) -> bool:
        """Whether no worker has a log, as far as was read."""
        return not self._sizes

    def _listed(self) -> dict[str, int]:
        """Return the bytes of each worker's log."""
        sizes: dict[str, int] = {}
        for entry in self._store.list(WORKERS):
            name = entry.key.removeprefix(f"{WORKERS}/").partition("/")[0]
            sizes[f"{WORKERS}/{name}"] = sizes.get(f"{WORKERS}/{name}", 0) + entry.bytes
        return sizes

    def _read(self, key: str) -> list[LogLine]:
        process = key.removeprefix(f"{WORKERS}/").removesuffix(".jsonl")
        return list(_lines(jsonlog.read(self._store, key, with_dropped=True), process))

    def _noted(self, lines: list[LogLine]) -> Iterator[LogLine]:
        """Yield the lines that are new."""
        for line in lines:
            self.ranks.add(line.rank)
            self.generations.add(line.generation)
            if (line.process, line.at) not in self._shown:  # two processes may have passed on the same one
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
        raise ConfigError(f"{text!r} is no time", where="--since",
                          mend="give 10m (ten minutes ago; s, h and d too), 14:30, 2026-11-23T14:30, or "
                               "2026-11-23T14:30Z for UTC") from None


def _lines(records: list[dict[str, Any]], process: str) -> Iterator[LogLine]:
    """Yield the lines of one worker's log; a note of dropped lines becomes a line itself."""
    last: LogLine | None = None
    for record in records:
        if record.get("kind") == jsonlog.DROPPED:
            yield _note(record, last, process)
            continue
        try:
            last = LogLine.of_json(record)
        except (KeyError, TypeError, ValueError):  # damaged, or of a later version
            continue
        yield last


def _note(record: dict[str, Any], last: LogLine | None, process: str) -> LogLine:
    """Return a line, behind the last one that is there, that says how many are missing."""
    text = f"{record['detail']['lines']} lines are missing here: storage was away and the buffer was full"
    at = -1 - int(record["time"] * 1000)  # unique, and of no line in the process's output
    if last is None:
        return LogLine(float(record["time"]), "warning", "", 0, 0, 0, __name__, text, process, at)
    return replace(last, time=last.time + 1e-6, level="warning", logger=__name__, text=text, at=at)


def _importance(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
