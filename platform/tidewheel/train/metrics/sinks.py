"""The interface of metrics sinks, and the thread that serves them all, so that no step waits for them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tidewheel.errors import ConfigError

logger = logging.getLogger(__name__)
Record = Mapping[str, Any]
"""A line of metrics.jsonl: "step" and "time", numbers by name, "validation" and "sources" {domain: {name:
number}}, "sample" text."""
LEAVE_SECONDS = 0.5
"""`Background.leave` waits this long for a slow sink."""
WAITING = 10_000
"""Records that may wait for a slow sink. Beyond that the step waits, too: no record is dropped."""


class Sink(Protocol):
    """Takes records; called from one thread.

    A sink raises ConfigError for a mistake in its code, which ends the run. Every other error counts as a passing one.
    """

    def write(self, record: Record) -> None:
        """Take one record."""

    def restart(self, step: int) -> None:
        """Continue after `step`: records of later steps that came before no longer hold."""

    def flush(self) -> None:
        """Write out what is collected."""

    def close(self) -> None:
        """Write out what is collected and let go; the last call."""


_leaving: list[threading.Thread] = []
"""Threads that close the sinks of earlier generations of this process."""


def settle(seconds: float) -> None:
    """Wait for sinks of earlier generations to close: some services refuse to open the same run twice.

    Args:
        seconds: how long to wait at most.
    """
    until = time.monotonic() + seconds
    while _leaving and time.monotonic() < until:
        _leaving[0].join(max(0.0, until - time.monotonic()))
        if not _leaving[0].is_alive():
            del _leaving[0]


class Background:
    """Hands records to sinks from a thread of its own.

    A passing error, such as a server that does not answer, is logged, counted and reported once until the sink works
    again; the sink gets the next record nevertheless. A mistake in a sink's code is raised by the next call.

    Args:
        sinks: sinks by name, served in this order.
        on_failure: called from the thread with (name of the sink, reason, failed calls so far).
    """

    def __init__(self, sinks: Mapping[str, Sink], on_failure: Callable[[str, str, int], None]) -> None:
        self._sinks = dict(sinks)
        self._on_failure = on_failure
        self.failures: Counter[str] = Counter()
        """Failed calls by name of the sink."""
        self._failing: set[str] = set()
        self._mistake: ConfigError | None = None
        self._left = False
        self._queue: queue.Queue[Callable[[Sink], None] | threading.Event | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over one record, which must not change afterwards.

        Raises:
            ConfigError: the code of a sink has a mistake.
        """
        self._check()
        self._queue.put(lambda sink: sink.write(record))

    def restart(self, step: int) -> None:
        """Have the sinks continue after `step`; see `Sink.restart`.

        Raises:
            ConfigError: the code of a sink has a mistake.
        """
        self._check()
        self._queue.put(lambda sink: sink.restart(step))

    def flush(self) -> None:
        """Return once everything handed over is written out, or its failure is reported.

        Raises:
            ConfigError: the code of a sink has a mistake.
        """
        self._queue.put(lambda sink: sink.flush())
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        self._check()

    def close(self) -> None:
        """Write out everything and end the thread. A second call does nothing.

        Raises:
            ConfigError: the code of a sink has a mistake.
        """
        self._close()
        self._check()

    def leave(self) -> None:
        """Begin to write out and close everything, and wait for `LEAVE_SECONDS` at most; errors are only logged.

        A second call, or one after `close`, does nothing.
        """
        if self._thread.is_alive() and not self._left:
            self._left = True
            closing = threading.Thread(target=self._close, name="end of metrics", daemon=True)
            _leaving.append(closing)
            closing.start()
            self._thread.join(LEAVE_SECONDS)

    def _close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(lambda sink: sink.close())
            self._queue.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._mistake is not None:
            raise self._mistake

    def _serve(self) -> None:
        while (order := self._queue.get()) is not None:
            if isinstance(order, threading.Event):
                order.set()
                continue
            for name, sink in list(self._sinks.items()):
                try:
                    order(sink)
                except ConfigError as error:
                    self._stop(name, error)
                except Exception as error:  # whatever a client library may raise
                    self._count(name, error)
                else:
                    self._recovered(name)

    def _stop(self, name: str, error: ConfigError) -> None:
        """Serve a sink no longer, and keep its mistake for the next call of the training thread."""
        logger.error("tracker %s ends the run: %s", name, error)
        self._mistake = self._mistake or error
        sink = self._sinks.pop(name)
        with contextlib.suppress(Exception):  # its first mistake is the one to report
            sink.close()

    def _count(self, name: str, error: Exception) -> None:
        self.failures[name] += 1
        if name in self._failing:
            return
        self._failing.add(name)
        reason = f"{type(error).__name__}: {error}"[:300]
        logger.warning("tracker %s fails, training continues without it until it works again: %s", name, reason)
        with contextlib.suppress(Exception):  # the event log may be on the store that fails
            self._on_failure(name, reason, self.failures[name])

    def _recovered(self, name: str) -> None:
        if name in self._failing:
            self._failing.discard(name)
            logger.warning("tracker %s works again; %d of its calls have failed so far", name, self.failures[name])
