"""What a start of a run must know of its past, at a cost that does not grow with it.

The coordinator knows it while it lives and tells it to the workers. It also writes it to `state.json` now and then, for
the next driver, which adds what the newest records of the logs say.
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
"""Between two writes of `STATE`."""
LOOK_BACK = 1_000
"""Records of a log that a start reads at most."""
CLOCKS_SECONDS = 3600.0
"""So far apart the clocks of workers and driver may be."""


@dataclass(frozen=True)
class Past:
    """A run before a generation of it begins."""

    step: int = 0
    """The furthest that was done; later ones may have gone back to a checkpoint before it."""
    failures: int = 0
    """Of workers and nodes."""
    generation: int = -1
    """The newest, -1 before the first."""
    time: float = 0.0
    """Unix time when this was written, 0: it never was."""


def read_past(store: Store) -> Past:
    """What a run's folder says: `STATE`, and what the newest records of its logs add to it.

    Of a run without `STATE`, one of an older version or `--local`, only the newest `LOOK_BACK` records count.
    """
    past = _written(store)
    lines = _newest_batches(store, past.step)
    generation = max([past.generation, *(int(line.get("generation", -1)) for line in lines)])
    failures = past.failures
    for event in islice(newest_first(store, EVENTS), LOOK_BACK):
        at = float(event.get("time", 0.0))
        if at < past.time - CLOCKS_SECONDS:
            break
        generation = max(generation, int(_detail(event).get("generation", -1)))
        failures += event.get("kind") == "failure" and at > past.time  # both by the coordinator's clock
    return replace(past, step=_furthest(lines, past.step), failures=failures, generation=generation)


def last_step(store: Store, known: int = 0) -> int:
    """The furthest step that has a record, or `known`, a step that is known to have been reached."""
    return _furthest(_newest_batches(store, known), known)


def _newest_batches(store: Store, known: int) -> list[dict[str, Any]]:
    """Newest records of batches, back to the first that says no more than that `known` was reached."""
    found = []
    for line in islice(newest_first(store, "batches.jsonl"), LOOK_BACK):
        found.append(line)
        if int(line["step"]) <= known:
            break
    return found


def _furthest(lines: Sequence[Mapping[str, Any]], known: int) -> int:
    return max([known, *(int(line["step"]) for line in lines)])


def _written(store: Store) -> Past:
    """`STATE`, or nothing when it is not there or damaged: the logs know the most of it."""
    try:
        values = json.loads(store.read(STATE))
        return Past(int(values["step"]), int(values["failures"]), int(values["generation"]), float(values["time"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Past()


def _detail(event: dict[str, Any]) -> dict[str, Any]:
    detail = event.get("detail")
    return detail if isinstance(detail, dict) else {}


class PastWriter:
    """Writes what `now` returns to `STATE` whenever it has changed, in a thread of its own: nobody waits for the store.

    Args:
        now: called from that thread.
    """

    def __init__(self, store: Store, now: Callable[[], Past], seconds: float = STATE_SECONDS) -> None:
        self._store, self._now, self._seconds = store, now, seconds
        self._last: Past | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state of the run", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def end(self, timeout: float = 5.0) -> None:
        """Write once more and stop; a store that does not answer within `timeout` is left alone."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._write()
        self._write()

    def _write(self) -> None:
        past = self._now()
        if self._last is not None and replace(past, time=self._last.time) == self._last:
            return
        try:
            self._store.write_json(STATE, asdict(past))
        except (StorageError, OSError):  # next time; until then the logs say what is missing
            return
        self._last = past
