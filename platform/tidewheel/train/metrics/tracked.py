"""Open a run's trackers, and tell what they raise apart: mistakes in their code end the run, other errors pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from tidewheel.errors import ConfigError
from tidewheel.parts import is_own, name_of
from tidewheel.train.failures import CODE_MISTAKES, is_passing, mistake
from tidewheel.train.metrics.sinks import Record, Sink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker

T = TypeVar("T")
OPEN_SECONDS = 30.0
"""Between two tries to open a tracker whose service did not answer."""


def open_sinks(trackers: Sequence[Tracker], run: TrackedRun) -> dict[str, Sink]:
    """Return the sinks of a run's trackers by name; a second tracker of one kind is "name 2".

    Args:
        trackers: in the order of the configuration.
        run: the run whose records they take.

    Raises:
        ConfigError: a tracker cannot work here, or its code has a mistake.
    """
    sinks: dict[str, Sink] = {}
    count = Counter[str]()
    for tracker in trackers:
        sink = TrackerSink(tracker, run)
        if sink.may_write:
            name = name_of(type(tracker))
            count[name] += 1
            sinks[name if count[name] == 1 else f"{name} {count[name]}"] = sink
    return sinks


class TrackerSink:
    """The sink of a tracker. When a service does not respond at first, it opens the tracker's sink later.

    Args:
        tracker: the tracker.
        run: the run whose records it takes.
        clock: time in seconds.

    Raises:
        ConfigError: the tracker cannot work here, or its code has a mistake.
    """

    def __init__(self, tracker: Tracker, run: TrackedRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = tracker
        self._run = run
        self._clock = clock
        self._sink: Sink | None = None
        self._unopened: Exception | None = None
        self._next_try = 0.0
        self._open()

    @property
    def may_write(self) -> bool:
        """Whether a sink is open, or may open later."""
        return self._sink is not None or self._unopened is not None

    def write(self, record: Record) -> None:
        """Hand on one record."""
        self._call("write", lambda sink: sink.write(record))

    def restart(self, step: int) -> None:
        """See `Sink.restart`."""
        self._call("restart", lambda sink: sink.restart(step))

    def flush(self) -> None:
        """See `Sink.flush`."""
        if self._sink is not None:
            self._call("flush", lambda sink: sink.flush())

    def close(self) -> None:
        """See `Sink.close`."""
        if self._sink is not None:
            self._call("close", lambda sink: sink.close())

    def _call(self, method: str, call: Callable[[Sink], None]) -> None:
        if self._unopened is not None and self._clock() >= self._next_try:
            self._open()
        if self._unopened is not None:
            raise self._unopened
        sink = self._sink
        if sink is not None:
            self._guard(method, lambda: call(sink))

    def _open(self) -> None:
        try:
            self._sink = self._guard("open", lambda: self._tracker.open(self._run))
            self._unopened = None
        except ConfigError:
            raise
        except Exception as error:
            if not is_passing(error):
                raise
            self._unopened = error
            self._next_try = self._clock() + OPEN_SECONDS

    def _guard(self, method: str, call: Callable[[], T]) -> T:
        """Return what a call returns, and raise ConfigError for a mistake in the user's own code."""
        try:
            return call()
        except CODE_MISTAKES as error:
            if is_passing(error) or not is_own(name_of(type(self._tracker))):
                raise
            raise mistake(self._tracker, "tracker", method, error) from error
