"""Measure how long a new driver and rank 0 take to read a run's past from an object store, by the run's age.

    python -m tests.benchmarks.run_age [--days 1 10 30] [--latency 0.02] [--parts-hours 2]

The store answers each request after 20 ms. A step takes a second, a generation three hours. The last row is a start
that reads all records, as earlier versions did when each flush was its own object. The exit code is 1 when a start
takes more than 20 requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.aged_run import AgedRun, start
from tidewheel import jsonlog
from tidewheel.console import print_table
from tidewheel.storage import store

MOST_REQUESTS = 20


def measured(run: AgedRun, read: Callable[[], Any], layout: str, days: float) -> dict[str, Any]:
    """Measure a start and return a row of the table."""
    store(run.uri).exists("run.json")  # starts the client before the measurement
    run.requests = 0
    began = time.perf_counter()
    read()
    seconds = time.perf_counter() - began
    return {"layout": layout, "run": f"{days:g} days" if days >= 1 else f"{24 * days:g} hours",
            "steps": f"{run.steps:,}", "objects": f"{len(run.objects):,}", "requests": f"{run.requests:,}",
            "seconds": f"{seconds:.2f}"}


def read_all(uri: str) -> None:
    """Read what a start of earlier versions read: events and batches in the coordinator and in rank 0, and metrics."""
    for log in ("events.jsonl", "batches.jsonl", "events.jsonl", "batches.jsonl", "metrics.jsonl"):
        jsonlog.read(store(uri), log)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--days", type=float, nargs="+", default=[1, 10, 30])
    options.add_argument("--latency", type=float, default=0.02)
    options.add_argument("--parts-hours", type=float, default=2.0, help="age of a run with an object for each flush")
    given = options.parse_args()
    rows = []
    for days in given.days:
        with AgedRun(days, latency=given.latency) as run:
            start(run.uri, run.steps - 30)  # imports modules and generates the store's objects
            rows.append(measured(run, lambda run=run: start(run.uri, run.steps - 30), "segments", days))
    most_requests = max(int(row["requests"]) for row in rows)
    days = given.parts_hours / 24
    with AgedRun(days, latency=given.latency, parts=True, state=False) as run:
        rows.append(measured(run, lambda: start(run.uri, run.steps - 30), "parts, continued now", days))
        rows.append(measured(run, lambda: read_all(run.uri), "parts, all read", days))
    print_table(rows, title=f"what a start reads, {1000 * given.latency:g} ms a request")
    return 0 if most_requests <= MOST_REQUESTS else 1


if __name__ == "__main__":
    sys.exit(main())
