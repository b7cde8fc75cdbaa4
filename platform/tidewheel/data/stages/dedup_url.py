"""URL deduplication: of the documents whose URLs have the same normal form, keep the best one by the total order.

If a recipe has this step, the keys of a partition include hashes of the URLs. Documents without a URL are not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, url, verdicts
from tidewheel.data.stages import drops
from tidewheel.data.stages.drops import DROP_SCHEMA, after, part_tasks, shuffle_drops, with_partition
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.keys import URL_COLUMNS
from tidewheel.data.stages.partition import Part, load_keys
from tidewheel.versions import Version

STAGE = "dedup_url"
REASON = "url_duplicate"
VERSION = Version("dedup_url", uses=(dedup.VERSION, drops.VERSION, url.VERSION))
ROWS = dedup.KEY_SCHEMA.append(pa.field("bucket", pa.int32()))


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find documents with the same URL among the remaining ones.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.

    Returns:
        The units, and the partitions without the duplicates.
    """
    todo = part_tasks(job, STAGE, parts, settings={}, version=VERSION, together=True,
                      more={"partitions": job.partitions})
    meet = Hop("bucket", functools.partial(losers, job.partitions), DROP_SCHEMA)
    done = runner.complete(STAGE, todo, lambda missing: shuffle_drops(
        todo, read_keys, ROWS, [meet], missing, reason=REASON, partitions=job.partitions))
    return done, after(parts, done.units)


def read_keys(task: Task) -> Iterator[pa.Table]:
    """Yield key rows of a partition's documents with a URL; hashes of URLs take the place of hashes of texts."""
    order = tuple(name for name, _ in dedup.ORDER_COLUMNS)
    table = load_keys(task.store, task.inputs, (*URL_COLUMNS, *order))
    table = table.filter(pc.is_valid(table[URL_COLUMNS[0]])).select([*URL_COLUMNS, *order])
    table = table.rename_columns(list(dedup.KEY_COLUMNS))
    buckets = verdicts.partition_of(table["hash_hi"].to_numpy(), task.inputs["partitions"])
    yield table.append_column("bucket", pa.array(buckets))


def losers(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """Return the duplicates in one bucket, with the partition of each; `DROP_SCHEMA`.

    Args:
        partitions: number of partitions.
        _: number of the bucket.
        table: key rows of the bucket, in any order.
    """
    return with_partition(dedup.exact_duplicates(table.select(dedup.KEY_COLUMNS)), partitions)
