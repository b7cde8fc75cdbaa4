"""What the coordinator writes of a run and tells the driver: events.jsonl, the run's history, and its progress."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tidewheel.elastic.messages import StepDone
from tidewheel.elastic.run_events import Pace, RunEvents, Snapshot, completed
from tidewheel.elastic.start_times import FORMED, RESTORED, STEPPED, StartTimes
from tidewheel.storage import Store
from tidewheel.train.history import RunHistory, read_history
from tidewheel.train.logs.line import HERE

logger = logging.getLogger(__name__)


class RunRecord:
    """The record of a run. Any thread may call it.

    Args:
        run: the run's folder. What is recorded there is continued.
        order: place of this driver's events among those of other drivers; see `JsonLog`.
        start_times: measures the driver's start.
        hosts: host by node, for events that name nodes.
    """

    def __init__(self, run: Store, order: int, start_times: StartTimes, hosts: Mapping[str, str]) -> None:
        self.snapshot = Snapshot()
        """The present state of the run."""
        self.failed = -2
        """Newest generation whose failure is recorded."""
        self._history = read_history(run)
        self._events = RunEvents(run, order=order)
        self._start_times = start_times
        self._hosts = hosts
        self._pace = Pace()
        self._changing = threading.Lock()  # several threads change the snapshot

    # -- events ------------------------------------------------------------------------------------
    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event of the coordinator.

        Args:
            kind: its name.
            detail: its fields.
            at: monotonic seconds; None: now.
        """
        unix = time.time() if at is None else time.time() - (time.monotonic() - at)
        detail = completed(kind, detail, unix, self._hosts)
        logger.info("event %s %s", kind, json.dumps(detail, default=str))
        self._write(kind, detail, unix)
        if kind == "failure":
            self.failed = int(detail["generation"])

    def worker_event(self, kind: str, detail: dict[str, Any], unix: float) -> None:
        """Record an event of a worker, whose own log has it already.

        Args:
            kind: its name.
            detail: its fields.
            unix: Unix time at which it happened.
        """
        self._write(kind, detail, unix)
        if kind in ("start", "resume"):
            self.reach(RESTORED, unix)

    def _write(self, kind: str, detail: dict[str, Any], unix: float) -> None:
        self._events.record(kind, detail, unix)
        if kind == "failure":
            self._history = replace(self._history, failures=self._history.failures + 1)

    def reach(self, moment: str, unix: float) -> None:
        """Note a moment of the driver's start; record the event `started` with the last one.

        Args:
            moment: which, one of `start_times.PARTS`.
            unix: its Unix time.
        """
        started = self._start_times.reach(moment, unix)
        if started is not None:
            self.event("started", started)

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call that the driver prints."""
        return self._events.news()

    def flush_due(self) -> None:
        """Write collected events if it is time."""
        self._events.flush_due()

    def flush(self) -> None:
        """Write all collected events.

        Raises:
            StorageError: the store fails.
        """
        self._events.flush()

    # -- state -------------------------------------------------------------------------------------
    def history(self, furthest_step: int) -> RunHistory:
        """Return the run's history for a new worker or the next driver.

        Args:
            furthest_step: furthest step that the run has ever done.
        """
        return replace(self._history, step=furthest_step, time=time.time(),
                       generation=max(self._history.generation, self.snapshot.generation))

    @property
    def past_step(self) -> int:
        """The furthest step that the run had done before this driver."""
        return self._history.step

    def begin(self, number: int, size: int) -> None:
        """Note that a generation begins.

        Args:
            number: its number.
            size: number of its workers.
        """
        self._pace = Pace()
        HERE.begin(number, 0)
        logger.info("generation %d begins with %d workers", number, size)
        self.reach(FORMED, time.time())
        state = "starting" if self.snapshot.generation < 0 else "restarting"
        self.show(generation=number, size=size, state=state)

    def step(self, done: StepDone) -> float | None:
        """Note a step of rank 0; return the seconds until the run is over, None for a step of an earlier generation."""
        if done.generation != self.snapshot.generation:
            return None
        if not self._start_times.complete:
            self.reach(STEPPED, time.time())
        HERE.step = done.step
        progress = {"step": done.step, "steps": done.steps, **done.metrics}
        self.show(progress=progress, state="running")
        return self._pace.remaining(done.step, done.steps)

    def show(self, **changes: Any) -> None:
        """Change fields of the snapshot. A lost change of `generation` would hide all steps of that generation."""
        with self._changing:
            self.snapshot = replace(self.snapshot, **changes)
