"""Requests per day that a run makes to an object store, which decide its bill and whether it meets rate limits.

They are upper bounds, computed from the same constants that the code waits by. A log without new lines is not written.
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
"""Objects in an answer to one list request, or in one delete request."""


@dataclass(frozen=True)
class Requests:
    """Requests for one purpose."""

    what: str
    a_day: int
    """Upper bound of requests per day."""
    how: str
    """What makes them, as text."""


def requests(job: Job, cluster: ClusterConfig, step_seconds: float, checkpoint_bytes: float,
             interval_seconds: float) -> list[Requests]:
    """Return the requests of a run on an object store, without those for reading shards.

    Args:
        job: the run.
        cluster: the cluster.
        step_seconds: seconds of a training step.
        checkpoint_bytes: bytes of a checkpoint.
        interval_seconds: seconds between two saves.
    """
    metrics = job.config.metrics
    nodes = math.ceil(cluster.gpus / cluster.nodes_of)
    line_seconds = step_seconds * metrics.every_steps
    every = f"put every {jsonlog.FLUSH_SECONDS:g} s, or as often as there are lines"
    rows = [Requests("metrics.jsonl", _times(max(jsonlog.FLUSH_SECONDS, line_seconds)), every),
             Requests("batches.jsonl", _times(max(jsonlog.FLUSH_SECONDS, step_seconds)), every),
             Requests("events.jsonl", _times(jsonlog.FLUSH_SECONDS), every),
             Requests("ledger.jsonl", nodes * _times(node_log.SECONDS),
                      f"{nodes:,} nodes, each puts its ranks' lines every {node_log.SECONDS:g} s"),
             Requests("logs", cluster.gpus * _times(worker_log.SECONDS),
                      f"{cluster.gpus:,} workers, each puts new lines every {worker_log.SECONDS:g} s, if any"),
             Requests("state.json", _times(history.STATE_SECONDS), f"put every {history.STATE_SECONDS:g} s"),
             # the owner puts its heartbeat, then lists and reads the newest commit
             Requests("owner", 3 * _times(REMOTE.beat), f"put, list and get every {REMOTE.beat:g} s")]
    for tracker in metrics.trackers:
        if seconds := tracker.STORE_SECONDS:
            rows.append(Requests(name_of(type(tracker)), _times(max(seconds, line_seconds)),
                                  f"put every {seconds:g} s"))
    per_save = save_requests(cluster.gpus, checkpoint_bytes, job.config.checkpoint.keep_last)
    rows.append(Requests("checkpoints", _times(interval_seconds) * per_save,
                         f"{per_save:,} per checkpoint, every {interval_seconds / 60:.1f} min"))
    return rows


def save_requests(ranks: int, checkpoint_bytes: float, kept: int) -> int:
    """Return the requests of one checkpoint: each rank's file, in parts if it is large, the commit, and deletions.

    Args:
        ranks: number of ranks that write it.
        checkpoint_bytes: bytes of the checkpoint.
        kept: number of newest checkpoints that are kept.
    """
    parts = math.ceil(checkpoint_bytes / ranks / streams.PART_BYTES)
    files = ranks * (1 if parts <= 1 else parts + 2)  # a multipart upload is also created and completed
    manifest, commit = 1, 3 + 1  # list commits, read the newest, create the next; a removal is a commit too
    pages = math.ceil((kept + 2) * (ranks + 1) / LISTED)
    checked = pages + kept + 2  # all checkpoints are listed, and their manifests read
    removed = 1 + 2 * math.ceil((ranks + 1) / LISTED)  # the manifest, then the files below the folder
    return files + manifest + commit + checked + removed


def _times(seconds: float) -> int:
    """Return how many times per day something happens every `seconds`."""
    return math.ceil(DAY / seconds)
