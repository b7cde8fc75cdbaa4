"""The failures of nodes across runs, in one log in the folder of runs, and which nodes to leave out because of them.

A node is known by its host, because Ray gives it another id each time its process starts. All runs append to the same
log. A run reads it once, at the start of its driver.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tidewheel.jsonlog import JsonLog, newest_first
from tidewheel.storage import Store

LOG = "node_history.jsonl"
LOOK_BACK = 5_000
"""Newest failures that are read."""
TEXT_CHARACTERS = 300


@dataclass(frozen=True)
class NodeFailure:
    """One failure that a node is blamed for."""

    time: float
    """Unix seconds."""
    host: str
    run: str
    """URI of the run."""
    text: str
    """The error."""


@dataclass(frozen=True)
class NodeRecord:
    """The failures of one node within a time, the oldest first."""

    host: str
    failures: tuple[NodeFailure, ...]

    def excluded_until(self, least: int, seconds: float) -> float:
        """Return the Unix time until which to leave the node out; -inf if it has fewer than `least` failures.

        Args:
            least: number of failures; 0: leave out no node.
            seconds: time after the last failure. It doubles each time the number of failures does.
        """
        if not least or len(self.failures) < least:
            return -math.inf
        return self.failures[-1].time + seconds * 2 ** int(math.log2(len(self.failures) / least))


def read(folder: Store, since: float) -> list[NodeFailure]:
    """Return the failures since a Unix time, the oldest first. Skip lines that hold no failure.

    Args:
        folder: the folder of runs.
        since: Unix seconds.
    """
    newest = (_parsed(line) for line in islice(newest_first(folder, LOG), LOOK_BACK))
    failures = dict.fromkeys(failure for failure in newest if failure is not None and failure.time >= since)
    oldest_first = list(reversed(failures))
    return sorted(oldest_first, key=lambda failure: failure.time)


def by_host(failures: Iterable[NodeFailure], since: float) -> dict[str, NodeRecord]:
    """Return the record of each node with a failure since a Unix time.

    Args:
        failures: of all nodes.
        since: Unix seconds.
    """
    hosts: dict[str, list[NodeFailure]] = defaultdict(list)
    for failure in sorted(failures, key=lambda failure: failure.time):
        if failure.time >= since:
            hosts[failure.host].append(failure)
    return {host: NodeRecord(host, tuple(its)) for host, its in hosts.items()}


class NodeHistory:
    """Appends failures to the log. It never waits for storage.

    Args:
        folder: the folder of runs.
        run: URI of the run.
    """

    def __init__(self, folder: Store, run: str) -> None:
        self._folder, self._run = folder, run
        self._log: JsonLog | None = None

    def append(self, host: str, text: str, unix: float) -> NodeFailure:
        """Record a failure and return it.

        Args:
            host: of the node.
            text: the error.
            unix: Unix seconds.
        """
        failure = NodeFailure(unix, host, self._run, text[:TEXT_CHARACTERS])
        if self._log is None:  # most runs have none, so that no object is made
            self._log = JsonLog(self._folder, LOG, order=int(time.time()))
        self._log.append(asdict(failure))
        return failure

    def close(self) -> None:
        """Write what has not been written."""
        if self._log is not None:
            self._log.close()


def _parsed(line: Mapping[str, Any]) -> NodeFailure | None:
    try:
        return NodeFailure(float(line["time"]), str(line["host"]), str(line["run"]), str(line["text"]))
    except (KeyError, TypeError, ValueError):
        return None
