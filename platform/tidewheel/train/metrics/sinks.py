"""Where metrics go: one small interface, one thread that serves all of them, so that the step waits for none."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Record = Mapping[str, Any]
"""A line of metrics.jsonl: "step" and "time", numbers by name, "validation" {domain: {name: number}}, "sample" text."""
LEAVE_SECONDS = 0.5
"""Whoever leaves a slow sink behind waits this long for it."""
WAITING = 10_000
"""Records that may wait for a slow sink before the step waits too: none is thrown away."""


class Sink(Protocol):
    """Takes records; called from one thread."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def restart(self, step: int) -> None:
        """The run goes on after `step`: what was told of later ones no longer holds."""

    def flush(self) -> None:
        """Write out what is collected."""

    def close(self) -> None:
        """The last call."""


_leaving: list[threading.Thread] = []
"""They close what earlier generations of this process left behind."""


def settle(seconds: float) -> None:
    """Wait up to `seconds` for what was left behind: a service may not have the same run open twice."""
    until = time.monotonic() + seconds
    while _leaving and time.monotonic() < until:
        _leaving[0].join(max(0.0, until - time.monotonic()))
        if not _leaving[0].is_alive():
            del _leaving[0]


class Background:
    """Hands records to sinks from a thread of its own.

    A sink that fails is told of once and tried again with the next record: a metrics server that is away must not stop
    the training.

    Args:
        sinks: served in this order, by name.
        on_failure: called from the thread with (name of the sink, reason), once for each until it works again.
    """

    def __init__(self, sinks: Mapping[str, Sink], on_failure: Callable[[str, str], None]) -> None:
        self._sinks, self._on_failure = dict(sinks), on_failure
        self._failing: set[str] = set()
        self._left = False
        self._queue: queue.Queue[Callable[[Sink], None] | threading.Event | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over one record, which must not change afterwards."""
        self._queue.put(lambda sink: sink.write(record))

    def restart(self, step: int) -> None:
        """See `Sink.restart`."""
        self._queue.put(lambda sink: sink.restart(step))

    def flush(self) -> None:
        """Return once everything handed over has been written out, or its failure told."""
        self._queue.put(lambda sink: sink.flush())
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Write out everything and end the thread; a second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(lambda sink: sink.close())
            self._queue.put(None)
            self._thread.join()

    def leave(self) -> None:
        """Have everything written out and closed, and do not wait for a sink that is slow. A second call, or one after
        `close`, does nothing."""
        if self._thread.is_alive() and not self._left:
            self._left = True
            closing = threading.Thread(target=self.close, name="end of metrics", daemon=True)
            _leaving.append(closing)
            closing.start()
            self._thread.join(LEAVE_SECONDS)

    def _serve(self) -> None:
        while (order := self._queue.get()) is not None:
            if isinstance(order, threading.Event):
                order.set()
                continue
            for name, sink in self._sinks.items():
                try:
                    order(sink)
                    self._failing.discard(name)
                except Exception as error:  # whatever a client library may raise
                    self._told(name, error)

    def _told(self, name: str, error: Exception) -> None:
        if name not in self._failing:
            self._failing.add(name)
            with contextlib.suppress(Exception):  # the event log may be on the store that fails
                self._on_failure(name, f"{type(error).__name__}: {error}"[:300])
