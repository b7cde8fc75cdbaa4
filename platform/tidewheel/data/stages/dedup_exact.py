"""Exact deduplication: a shuffle groups key rows by text hash, a second one returns the duplicates to their partition.

Only keys are shuffled: 50 bytes and the id for each document. If the recipe's near-deduplication names earlier dumps,
their documents take part and win.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, verdicts
from tidewheel.data.stages import drops, near_index
from tidewheel.data.stages.drops import DROP_SCHEMA, after, part_tasks, shuffle_drops, with_partition
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.near_index import Index
from tidewheel.data.stages.partition import Part, load_keys
from tidewheel.versions import Version

STAGE = "dedup_exact"
REASON = "exact_duplicate"
VERSION = Version("dedup_exact", uses=(dedup.VERSION, drops.VERSION, near_index.VERSION))
ROWS = dedup.KEY_SCHEMA.append(pa.field("bucket", pa.int32()))


def tasks(job: Job, parts: list[Part]) -> list[Task]:
    """Return one task for each partition."""
    return part_tasks(job, STAGE, parts, settings=[index.hash for index in job.indexes], together=True,
                      version=VERSION, more={"against": [index.uri for index in job.indexes]})


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the exact duplicates among the remaining documents.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.

    Returns:
        The units, and the partitions without the duplicates.
    """
    todo = tasks(job, parts)
    meet = Hop("bucket", functools.partial(losers, job.partitions), DROP_SCHEMA)
    sources = [*todo, *near_index.source_tasks(job, {})]
    read = functools.partial(read_keys, job.indexes, job.partitions)
    done = runner.complete(STAGE, todo, lambda missing: shuffle_drops(
        sources, read, ROWS, [meet], missing, reason=REASON, partitions=job.partitions))
    return done, after(parts, done.units)


def read_keys(indexes: Sequence[Index], partitions: int, task: Task) -> Iterator[pa.Table]:
    """Yield key rows of one partition, or of one file of an index, each with the bucket of its hash.

    Args:
        indexes: indexes of earlier dumps.
        partitions: number of buckets.
        task: one of `tasks`, or of `near_index.source_tasks`.
    """
    if "index" in task.inputs:
        table = indexes[task.inputs["index"]].read(task.inputs["file"], dedup.KEY_COLUMNS)
    else:
        table = load_keys(task.store, task.inputs, dedup.KEY_COLUMNS)
    buckets = verdicts.partition_of(table["hash_hi"].to_numpy(), partitions)
    yield table.select(dedup.KEY_COLUMNS).append_column("bucket", pa.array(buckets))


def losers(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """Return the duplicates in one bucket, with the partition of each; `DROP_SCHEMA`.

    Args:
        partitions: number of partitions.
        _: number of the bucket.
        table: key rows of the bucket, in any order.
    """
    duplicates = dedup.exact_duplicates(table.select(dedup.KEY_COLUMNS))
    return with_partition(duplicates.filter(pc.invert(dedup.is_old(duplicates["id"]))), partitions)
