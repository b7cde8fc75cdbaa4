"""Record what a worker spends its time on, in the run's ledger.

Time is labelled after the fact: `spent(category)` labels everything since the last call. So a worker's intervals join
without gaps, and the loop can label a step that ended in an exception.
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
"""Shorter intervals are added to the one before: a line for each would cost more than it says."""
LEDGER = "ledger.jsonl"
HAND_OVER_SECONDS = 2.0
"""Between two hand-overs of intervals to the log. A worker that is killed loses at most this much."""


def ledger(store: Store, runtime: Runtime) -> JsonLog | NodeLog:
    """Return the log of the run's ledger: one file for all ranks, or one writer a node on an object store."""
    if store.local_path(LEDGER) is not None:
        return JsonLog(store, LEDGER)
    return NodeLog(store, LEDGER, generation=runtime.generation, rank=runtime.rank)


class Timeline:
    """One worker's part of the ledger.

    Args:
        log: see `ledger`.
        runtime: names the rank, the generation and the node.
        began: Unix time at which the first interval starts.
        flush_seconds: between two hand-overs to the log.
    """

    def __init__(self, log: JsonLog | NodeLog, runtime: Runtime, began: float,
                 flush_seconds: float = HAND_OVER_SECONDS) -> None:
        self._log = log
        self._flush_seconds = flush_seconds
        self._worker = {"rank": runtime.rank, "generation": runtime.generation, "node": runtime.node}
        self._mark = began
        self._flushed = began
        self._intervals: list[list[Any]] = []  # [category, start, end, waited], joined end to end

    def spent(self, category: Category, waited: float = 0.0) -> float:
        """Label the time since the last call with `category`, and return its seconds.

        Args:
            category: of the time.
            waited: seconds of it in which the step waited for other workers.
        """
        now = time.time()
        start, self._mark = self._mark, now
        last = self._intervals[-1] if self._intervals else None
        if last and (last[0] == category or now - start < SHORTEST_SECONDS):
            last[2] = now
            last[3] += waited
        else:
            self._intervals.append([category, start, now, waited])
        if now - self._flushed >= self._flush_seconds:
            self._hand_over()
            self._log.flush_soon()
        return now - start

    def flush(self) -> None:
        """Write out the intervals so far."""
        self._hand_over()
        self._log.flush()

    def finish(self) -> None:
        """Write out the intervals of all ranks; call it when the run is over."""
        self._hand_over()
        if isinstance(self._log, NodeLog):
            self._log.finish()
        else:
            self._log.flush()

    def close(self) -> None:
        """Hand over the last intervals and let go of the log, without waiting for the store."""
        self._hand_over()
        self._log.close()

    def _hand_over(self) -> None:
        intervals, self._intervals = self._intervals, []
        self._flushed = time.time()
        for category, start, end, waited in intervals:
            share = {"waited": round(waited, 4)} if waited >= SHORTEST_SECONDS else {}
            self._log.append({"time": end, **self._worker, "category": category, "start": start, "end": end, **share})
