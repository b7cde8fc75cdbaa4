"""TensorBoard."""

from __future__ import annotations

from typing import ClassVar

from tidewheel.train.metrics.sinks import Sink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker

FLUSH_SECONDS = 10.0
"""Time between two flushes of event files."""


class TensorBoard(Tracker):
    """Event files in the run's tensorboard/."""

    STORE_SECONDS: ClassVar[float] = FLUSH_SECONDS

    def open(self, run: TrackedRun) -> Sink | None:
        from tidewheel.train.trackers.clients.event_files import EventFiles

        return EventFiles(run.store, step=run.step, generation=run.generation, flush_seconds=FLUSH_SECONDS)
