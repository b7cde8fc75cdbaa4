"""Exact deduplication: key rows meet by text hash, the losers go home to their partition.

Only keys are shuffled: 50 bytes and the id a document. Documents of the earlier dumps that a near-deduplication of the
same recipe is run against take part, as better ones.
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
    """One unit for each partition of ids."""
    return part_tasks(job, STAGE, parts, settings=[index.hash for index in job.indexes], together=True,
                      version=VERSION, more={"against": [index.uri for index in job.indexes]})


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the exact duplicates among the documents that are left."""
    todo = tasks(job, parts)
    meet = Hop("bucket", functools.partial(losers, job.partitions), DROP_SCHEMA)
    sources = [*todo, *near_index.source_tasks(job, {})]
    read = functools.partial(read_keys, job.indexes, job.partitions)
    done = runner.complete(STAGE, todo, lambda missing: shuffle_drops(
        sources, read, ROWS, [meet], missing, reason=REASON, partitions=job.partitions))
    return done, after(parts, done.units)


def read_keys(indexes: Sequence[Index], partitions: int, task: Task) -> Iterator[pa.Table]:
    """Key rows of one partition, or of one file of an index, each with the bucket its hash falls into."""
    if "index" in task.inputs:
        table = indexes[task.inputs["index"]].read(task.inputs["file"], dedup.KEY_COLUMNS)
    else:
        table = load_keys(task.store, task.inputs, dedup.KEY_COLUMNS)
    buckets = verdicts.partition_of(table["hash_hi"].to_numpy(), partitions)
    yield table.select(dedup.KEY_COLUMNS).append_column("bucket", pa.array(buckets))


def losers(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """What goes of one bucket, with the partition it belongs to; `DROP_SCHEMA`."""
    found = dedup.exact_duplicates(table.select(dedup.KEY_COLUMNS))
    return with_partition(found.filter(pc.invert(dedup.is_old(found["id"]))), partitions)
