"""URL deduplication: of documents whose URLs have one normal form the best of the total order stays.

The keys of a partition carry the hashes of URLs when the recipe has this step; documents without a URL are not
compared.
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
    """Find the documents of one URL among those that are left."""
    todo = part_tasks(job, STAGE, parts, settings={}, version=VERSION, together=True,
                      more={"partitions": job.partitions})
    meet = Hop("bucket", functools.partial(losers, job.partitions), DROP_SCHEMA)
    done = runner.complete(STAGE, todo, lambda missing: shuffle_drops(
        todo, read_keys, ROWS, [meet], missing, reason=REASON, partitions=job.partitions))
    return done, after(parts, done.units)


def read_keys(task: Task) -> Iterator[pa.Table]:
    """Key rows of the documents of one partition that have a URL, hashes of URLs in place of those of texts."""
    order = tuple(name for name, _ in dedup.ORDER_COLUMNS)
    table = load_keys(task.store, task.inputs, (*URL_COLUMNS, *order))
    table = table.filter(pc.is_valid(table[URL_COLUMNS[0]])).select([*URL_COLUMNS, *order])
    table = table.rename_columns(list(dedup.KEY_COLUMNS))
    buckets = verdicts.partition_of(table["hash_hi"].to_numpy(), task.inputs["partitions"])
    yield table.append_column("bucket", pa.array(buckets))


def losers(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """What goes of one bucket, with the partition it belongs to; `DROP_SCHEMA`."""
    return with_partition(dedup.exact_duplicates(table.select(dedup.KEY_COLUMNS)), partitions)
