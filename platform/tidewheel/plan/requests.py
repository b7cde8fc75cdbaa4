"""Requests to an object store that a run makes in a day: what its bill and its rate limits are about.

Computed from the constants that the code itself waits by, as upper bounds: a log is not written when nothing was added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidewheel import jsonlog
from tidewheel.ownership import REMOTE
from tidewheel.parts import name_of
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.stores.objects import streams
from tidewheel.train import history, node_log
from tidewheel.train.logs import worker_log

DAY = 86_400.0
LISTED = 1_000
"""Objects in an answer to a request to list, or in one to delete."""


@dataclass(frozen=True)
class Requests:
    """Of one purpose."""

    what: str
    a_day: int
    """At most."""
    how: str
    """For people: what makes them."""


def requests(job: Job, cluster: ClusterConfig, step_seconds: float, checkpoint_bytes: float,
             interval_seconds: float) -> list[Requests]:
    """All that a run on an object store makes for itself; reading shards is not in it.

    Args:
        step_seconds: of a training step.
        checkpoint_bytes: of the whole state.
        interval_seconds: between two saves.
    """
    metrics = job.config.metrics
    nodes = math.ceil(cluster.gpus / cluster.nodes_of)
    line_seconds = step_seconds * metrics.every_steps
    every = f"put every {jsonlog.FLUSH_SECONDS:g} s, or as often as there are lines"
    found = [Requests("metrics.jsonl", _times(max(jsonlog.FLUSH_SECONDS, line_seconds)), every),
             Requests("batches.jsonl", _times(max(jsonlog.FLUSH_SECONDS, step_seconds)), every),
             Requests("events.jsonl", _times(jsonlog.FLUSH_SECONDS), every),
             Requests("ledger.jsonl", nodes * _times(node_log.SECONDS),
                      f"{nodes:,} nodes, each puts what its ranks have every {node_log.SECONDS:g} s"),
             Requests("logs", cluster.gpus * _times(worker_log.SECONDS),
                      f"{cluster.gpus:,} workers, each puts what it has said every {worker_log.SECONDS:g} s, if any"),
             Requests("state.json", _times(history.STATE_SECONDS), f"put every {history.STATE_SECONDS:g} s"),
             # the owner's sign of life is put, and then the newest commit listed and read
             Requests("owner", 3 * _times(REMOTE.beat), f"put, list and get every {REMOTE.beat:g} s")]
    for tracker in metrics.trackers:
        if seconds := tracker.STORE_SECONDS:
            found.append(Requests(name_of(type(tracker)), _times(max(seconds, line_seconds)),
                                  f"put every {seconds:g} s"))
    each = save_requests(cluster.gpus, checkpoint_bytes, job.config.checkpoint.keep_last)
    found.append(Requests("checkpoints", _times(interval_seconds) * each,
                          f"{each:,} for each, every {interval_seconds / 60:.1f} min"))
    return found


def save_requests(ranks: int, checkpoint_bytes: float, kept: int) -> int:
    """Of one checkpoint: a file of each rank, in parts when it is long; the commit; what is deleted for it.

    Args:
        ranks: that write it.
        kept: newest checkpoints that stay.
    """
    parts = math.ceil(checkpoint_bytes / ranks / streams.PART_BYTES)
    files = ranks * (1 if parts <= 1 else parts + 2)  # a long upload is begun and completed, too
    manifest, commit = 1, 3 + 1  # list the commits, read the newest, take the next; the removal is a commit as well
    pages = math.ceil((kept + 2) * (ranks + 1) / LISTED)
    looked = pages + kept + 2  # all checkpoints are listed and their manifests read
    removed = 1 + 2 * math.ceil((ranks + 1) / LISTED)  # the manifest, then what is listed below the folder
    return files + manifest + commit + looked + removed


def _times(seconds: float) -> int:
    """How often something happens in a day."""
    return math.ceil(DAY / seconds)
