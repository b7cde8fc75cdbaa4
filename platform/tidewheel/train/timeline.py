"""What one worker's time was spent on, written to the run's ledger.

Time is labelled after the fact: `spent(category)` says what everything since the last call was. So
the intervals of a worker join without a gap, and a step that ends in an exception can be called by its name.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from tidewheel.jsonlog import JsonLog
from tidewheel.storage import Store
from tidewheel.train.node_log import NodeLog
from tidewheel.train.runtime import Runtime

Category = Literal["productive", "redone", "data_wait", "save_stall", "detection", "restart", "idle"]
SHORTEST_SECONDS = 1e-3
"""A shorter interval is added to the one before it: it would cost a line and say nothing."""


LEDGER = "ledger.jsonl"
HAND_OVER_SECONDS = 2.0
"""Between two hand-overs of intervals to the log: what a worker that is killed loses."""


def ledger(store: Store, runtime: Runtime) -> JsonLog | NodeLog:
    """The run's ledger: a file that all append to, on an object store what a node writes for its ranks."""
    if store.local_path(LEDGER) is not None:
        return JsonLog(store, LEDGER)
    return NodeLog(store, LEDGER, generation=runtime.generation, rank=runtime.rank)


class Timeline:
    """One worker's ledger."""

    def __init__(self, log: JsonLog | NodeLog, runtime: Runtime, began: float,
                 flush_seconds: float = HAND_OVER_SECONDS) -> None:
        self._log, self._flush_seconds = log, flush_seconds
        self._who = {"rank": runtime.rank, "generation": runtime.generation, "node": runtime.node}
        self._mark = self._flushed = began
        self._intervals: list[list[Any]] = []  # [category, start, end], joined end to end

    def spent(self, category: Category) -> float:
        """Everything since the last call went to `category`; its seconds."""
        now = time.time()
        start, self._mark = self._mark, now
        last = self._intervals[-1] if self._intervals else None
        if last and (last[0] == category or now - start < SHORTEST_SECONDS):
            last[2] = now
        else:
            self._intervals.append([category, start, now])
        if now - self._flushed >= self._flush_seconds:
            self._hand_over()
            self._log.flush_soon()
        return now - start

    def flush(self) -> None:
        """Write the intervals so far."""
        self._hand_over()
        self._log.flush()

    def finish(self) -> None:
        """Write the intervals, those of all ranks: the run is over."""
        self._hand_over()
        self._log.finish() if isinstance(self._log, NodeLog) else self._log.flush()

    def close(self) -> None:
        """The last call, which waits for no store."""
        self._hand_over()
        self._log.close()

    def _hand_over(self) -> None:
        intervals, self._intervals = self._intervals, []
        self._flushed = time.time()
        for category, start, end in intervals:
            self._log.append({"time": end, **self._who, "category": category, "start": start, "end": end})
