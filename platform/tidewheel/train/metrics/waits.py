"""Time of a step in which a rank waits for other ranks: communication that no computation hides.

On CPU it is the time of the step in which the training thread sleeps: gloo blocks the thread that waits for it. On a
GPU it is the time of the compute stream between two events, around the points at which it waits for a collective. A
rank that is faster than the others waits for them, and that counts too. So does, on CPU, the training thread's wait for
the other threads of its own process, if a worker computes with several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tidewheel.train.metrics.measure import BusyTime
from tidewheel.train.metrics.own_time import Event


class Waits:
    """Measures one rank's waits; this one measures nothing."""

    def begin(self) -> None:
        """Note that the training thread begins to compute a step."""

    def end(self) -> None:
        """Note that it has enqueued the step, or does something else in between."""

    def take(self) -> float:
        """Return the seconds of waits since the last call, as far as they are known."""
        return 0.0

    def span(self) -> AbstractContextManager[None]:
        """Return a context in which a collective is waited for."""
        return nullcontext()

    def close(self) -> None:
        """Stop measuring."""


class ThreadWaits(Waits):
    """Seconds between `begin` and `end` in which the calling thread was neither running nor runnable."""

    def __init__(self) -> None:
        self._busy: BusyTime | None = None
        self._began: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        if self._busy is None:
            self._busy = BusyTime()  # in the thread that trains
        self._busy.restart()
        self._began = time.monotonic()

    def end(self) -> None:
        if self._busy is None or self._began is None:
            return
        self._seconds += max(0.0, time.monotonic() - self._began - self._busy.seconds())
        self._began = None

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        if self._busy is not None:
            self._busy.close()
            self._busy = None


class DeviceWaits(Waits):
    """Seconds of the compute stream between two events around each wait.

    The host never waits for the device: `take` returns the spans that the device has passed by then.

    Args:
        event: creates an event on the current stream.
    """

    def __init__(self, event: Callable[[], Event] = lambda: torch.cuda.Event(enable_timing=True)) -> None:  # type: ignore
        self._event = event
        self._spans: list[tuple[Event, Event]] = []

    def take(self) -> float:
        seconds = 0.0
        while self._spans and self._spans[0][1].query():
            began, ended = self._spans.pop(0)
            seconds += began.elapsed_time(ended) / 1000
        return seconds

    @contextmanager
    def span(self) -> Iterator[None]:
        began, ended = self._event(), self._event()
        began.record()
        yield
        ended.record()
        self._spans.append((began, ended))

    def close(self) -> None:
        self._spans = []


def waits_on(device: torch.device, workers: int) -> Waits:
    """Return what measures waits on a device.

    Args:
        device: that computes.
        workers: number of workers. A single one waits for no other.
    """
    if workers == 1:
        return Waits()
    return DeviceWaits() if device.type == "cuda" else ThreadWaits()


def measured(function: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
    """Return a function during which a collective is waited for."""
    def call(*arguments: Any, **named: Any) -> Any:
        with waits.span():
            return function(*arguments, **named)

    return call
