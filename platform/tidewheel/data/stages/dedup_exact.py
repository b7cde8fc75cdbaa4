"""Exact deduplication: key rows meet by text hash, the losers go home to their partition.

Only keys are shuffled: 50 bytes and the id a document.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyarrow as pa

from tidewheel.data import dedup, verdicts
from tidewheel.data.stage import code_version
from tidewheel.data.stages.drops import DROP_SCHEMA, after, part_tasks, shuffle_drops, with_partition
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_keys

STAGE = "dedup_exact"
REASON = "exact_duplicate"
_MODULES = ("tidewheel.data.dedup", "tidewheel.data.verdicts", "tidewheel.data.stage", "tidewheel.data.stages.drops",
            "tidewheel.data.stages.partition", "tidewheel.data.stages.dedup_exact")
ROWS = dedup.KEY_SCHEMA.append(pa.field("bucket", pa.int32()))


def tasks(job: Job, parts: list[Part]) -> list[Task]:
    """One unit for each partition of ids."""
    return part_tasks(job, STAGE, parts, settings={}, code=code_version(*_MODULES), together=True,
                      more={"partitions": job.partitions})


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the exact duplicates among the documents that are left."""
    todo = tasks(job, parts)
    meet = Hop("bucket", functools.partial(losers, job.partitions), DROP_SCHEMA)
    done = runner.complete(STAGE, todo, lambda missing: shuffle_drops(
        todo, read_keys, ROWS, [meet], missing, reason=REASON, partitions=job.partitions))
    return done, after(parts, done.units)


def read_keys(task: Task) -> Iterator[pa.Table]:
    """Key rows of one partition, each with the bucket its hash falls into."""
    table = load_keys(task.store, task.inputs, dedup.KEY_COLUMNS)
    buckets = verdicts.partition_of(table["hash_hi"].to_numpy(), task.inputs["partitions"])
    yield table.select(dedup.KEY_COLUMNS).append_column("bucket", pa.array(buckets))


def losers(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """What goes of one bucket, with the partition it belongs to; `DROP_SCHEMA`."""
    return with_partition(dedup.exact_duplicates(table.select(dedup.KEY_COLUMNS)), partitions)
