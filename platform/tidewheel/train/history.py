"""The history of a run that a new generation needs, at a cost that does not grow with the run.

The coordinator keeps the history while it lives and sends it to the workers. From time to time it also writes it to
`state.json`. The next driver reads that file and adds what the newest records of the logs say.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from tidewheel.errors import StorageError
from tidewheel.jsonlog import EVENTS, newest_first
from tidewheel.storage import Store

STATE = "state.json"
STATE_SECONDS = 30.0
"""Time between two writes of `STATE`."""
LOOK_BACK = 1_000
"""Most records of a log that a start reads."""
CLOCKS_SECONDS = 3600.0
"""Largest difference between the clocks of workers and driver."""


@dataclass(frozen=True)
class RunHistory:
    """A run before one of its generations starts."""

    step: int = 0
    """Furthest step that was done. Later generations may have gone back to a checkpoint before it."""
    failures: int = 0
    """Failures of workers and nodes."""
    generation: int = -1
    """Newest generation, -1 before the first."""
    time: float = 0.0
    """Unix time at which this was written, 0 if it never was."""


def read_history(store: Store) -> RunHistory:
    """Return the history in a run's folder: `STATE`, and what the newest records of the logs add to it.

    A run of an older version, or a run with `--local`, has no `STATE`. Then only the newest `LOOK_BACK` records count.
    """
    state = _read_state(store)
    batches = _newest_batches(store, state.step)
    generation = max([state.generation, *(int(record.get("generation", -1)) for record in batches)])
    failures = state.failures
    for event in islice(newest_first(store, EVENTS), LOOK_BACK):
        at = float(event.get("time", 0.0))
        if at < state.time - CLOCKS_SECONDS:
            break
        generation = max(generation, int(_detail(event).get("generation", -1)))
        failures += event.get("kind") == "failure" and at > state.time  # both times are by the coordinator's clock
    return replace(state, step=_furthest(batches, state.step), failures=failures, generation=generation)


def last_step(store: Store, known: int = 0) -> int:
    """Return the furthest step that has a record, or `known`, a step that the run is known to have reached."""
    return _furthest(_newest_batches(store, known), known)


def _newest_batches(store: Store, known: int) -> list[dict[str, Any]]:
    """Return the newest records of batches, back to the first whose step is at most `known`."""
    records = []
    for record in islice(newest_first(store, "batches.jsonl"), LOOK_BACK):
        records.append(record)
        if int(record["step"]) <= known:
            break
    return records


def _furthest(records: Sequence[Mapping[str, Any]], known: int) -> int:
    return max([known, *(int(record["step"]) for record in records)])


def _read_state(store: Store) -> RunHistory:
    """Return the content of `STATE`; an empty history if it is missing or damaged, since the logs know most of it."""
    try:
        values = json.loads(store.read(STATE))
        return RunHistory(int(values["step"]), int(values["failures"]), int(values["generation"]),
                          float(values["time"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return RunHistory()


def _detail(event: dict[str, Any]) -> dict[str, Any]:
    detail = event.get("detail")
    return detail if isinstance(detail, dict) else {}


class HistoryWriter:
    """Writes a run's history to `STATE` whenever it has changed, from a thread of its own.

    Args:
        store: the run's folder.
        now: returns the history; called from the thread.
        seconds: between two writes.
    """

    def __init__(self, store: Store, now: Callable[[], RunHistory], seconds: float = STATE_SECONDS) -> None:
        self._store = store
        self._now = now
        self._seconds = seconds
        self._last: RunHistory | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state of the run", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self, timeout: float = 5.0) -> None:
        """Write once more and stop.

        Args:
            timeout: seconds to wait for a store that does not answer.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._write()
        self._write()

    def _write(self) -> None:
        history = self._now()
        if self._last is not None and replace(history, time=self._last.time) == self._last:
            return
        try:
            self._store.write_json(STATE, asdict(history))
        except (StorageError, OSError):  # the next write may succeed; until then the logs hold what is missing
            return
        self._last = history
