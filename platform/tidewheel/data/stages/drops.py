"""Shared by all stages that drop documents: publish verdicts on each partition, and derive the partitions after it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tidewheel.data import dedup, verdicts
from tidewheel.data.stage import Cost, Published, Unit, UnitWriter, read_table, unit_key
from tidewheel.data.stages import by_source, keys, partition
from tidewheel.data.stages.execute import Hop, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_keys
from tidewheel.versions import Version

VERSION = Version("drops", uses=(verdicts.VERSION, by_source.VERSION, partition.VERSION))
"""Version of how a stage's verdicts on its partitions are written."""
DROP_SCHEMA = pa.schema([("id", pa.string()), ("survivor", pa.string()), ("score", pa.float64()),
                         ("partition", pa.int32())])
"""A dropped document, the better document it duplicates, their similarity, and the partition of the dropped one."""


def part_tasks(job: Job, stage: str, parts: Sequence[Part], *, settings: Any, version: Version, together: bool,
               more: Mapping[str, Any] | None = None) -> list[Task]:
    """Return a task for each partition.

    Args:
        job: what the stage works on.
        stage: name of the stage.
        parts: the partitions.
        settings: settings of the stage for the keys of its units, as JSON values.
        version: version of the stage.
        together: a partition's verdicts depend on all partitions, not on that partition alone.
        more: additional inputs of the tasks.
    """
    everything = [identity for part in parts for identity in part.content()] if together else []
    return [
        Task(job.output, Unit(stage, f"part-{part.number:05d}", unit_key(
            stage, settings=[settings, part.number, job.partitions], version=version,
            inputs=everything or part.content()), part.number),
            {**part.inputs(), "minhash": keys.minhash_settings(job.config), **(more or {})})
        for part in parts
    ]


def shuffle_drops(sources: Sequence[Task], read: Callable[[Task], Iterable[pa.Table]], rows: pa.Schema,
                  hops: Sequence[Hop], missing: Sequence[Task], *, reason: str, partitions: int) -> Iterator[Published]:
    """Publish the verdicts on the `missing` partitions.

    Args:
        sources: tasks to read.
        read: yields the rows of a task.
        rows: schema of these rows.
        hops: shuffles; the last one returns rows of `DROP_SCHEMA`, which are then sent to their partition.
        missing: tasks of the partitions to publish.
        reason: reason of the verdicts.
        partitions: number of partitions.
    """
    pending = {task.unit.number: task for task in missing}
    home = Hop("partition", functools.partial(_publish_pending, dict(pending), reason))
    for unit in shuffle_units(sources, read, rows, [*hops, home], partitions) if sources else ():
        del pending[unit.unit.number]
        yield unit
    for task in pending.values():  # these partitions lose no document
        yield publish_duplicates(task, reason, DROP_SCHEMA.empty_table())


def _publish_pending(pending: Mapping[int, Task], reason: str, partition: int, table: pa.Table) -> Published | None:
    return publish_duplicates(pending[partition], reason, table) if partition in pending else None


def with_partition(dropped: pa.Table, partitions: int) -> pa.Table:
    """Return rows of `dedup.DROPPED_SCHEMA` with the partition of each id: `DROP_SCHEMA`."""
    numbers = verdicts.partition_of(verdicts.hash_ids(dropped["id"]), partitions)
    return dropped.append_column("partition", pa.array(numbers))


def publish_duplicates(task: Task, reason: str, table: pa.Table, writer: UnitWriter | None = None) -> Published:
    """Publish the unit of one partition of a deduplication.

    A survivor of an earlier dump is recorded by its id; the detail names its index (one of `against` in the inputs).

    Args:
        task: the partition.
        reason: reason of the verdicts.
        table: dropped documents (`DROP_SCHEMA`).
        writer: writer of the unit, if some of its files are written already.
    """
    heads = None
    survivors = table["survivor"]
    dropped = verdicts.drops(table["id"], reason, scores=table["score"], survivors=dedup.plain_ids(survivors),
                             details=_details(survivors, task.inputs.get("against", ())))
    if len(table):
        heads = load_keys(task.store, task.inputs, ("id", "head"))
        known = pa.compute.is_in(dropped["id"], value_set=heads["id"].combine_chunks())
        assert pa.compute.all(known).as_py(), f"{task.unit}: a dropped document is not in its partition"
    return publish(task, dropped, heads, writer=writer)


def _details(survivors: pa.ChunkedArray, against: Sequence[str]) -> list[str]:
    if not against:
        return [""] * len(survivors)
    numbers = [dedup.index_of(survivor) for survivor in survivors.to_pylist()]
    return ["" if index is None else json.dumps({"index": against[index]}) for index in numbers]


def publish(task: Task, judged: pa.Table, heads: pa.Table | None, summary: Mapping[str, Any] | None = None,
            writer: UnitWriter | None = None,
            costs: Mapping[str, Cost] | None = None) -> Published:
    """Publish the unit of one partition, from its verdicts.

    Args:
        task: the partition, with `Part.inputs` among its inputs.
        judged: verdicts of any kind (`VERDICT_SCHEMA`), sorted by id; at most one drop for each document.
        heads: columns of the judged documents that `verdicts.samples` needs; None without verdicts.
        summary: additional counts of the stage.
        writer: writer of the unit, if some of its files are written already, for example by a `Rewriter`.
        costs: costs of the filters that judged.
    """
    writer = writer or task.writer()
    dropped_ids = verdicts.dropped_ids(judged)
    samples: dict[str, Any] = {}
    if len(judged):
        assert heads is not None
        assert len(dropped_ids.unique()) == len(dropped_ids), f"{task.unit}: a document is dropped twice"
        samples = verdicts.samples(judged, heads)
        writer.shared("verdicts", f"verdicts/{task.unit.stage}", ".parquet", verdicts.encode(judged))
    count = task.inputs["count"]
    return writer.publish({
        "documents_in": count, "documents": count - len(dropped_ids), "dropped": verdicts.counts(judged),
        "edits": verdicts.counts(judged, verdicts.EDIT), "edited": verdicts.edited(judged), "samples": samples,
        "left": _by_source(task, writer, dropped_ids), **(summary or {})}, costs)


def _by_source(task: Task, writer: UnitWriter, dropped_ids: pa.Array | pa.ChunkedArray) -> by_source.BySource:
    """Count the documents that the stage leaves in its partition, by source."""
    columns = ("id", "source", "length")
    if "keys" in writer.files:
        left = read_table(task.store, writer.files["keys"], columns)
    else:
        left = verdicts.without(load_keys(task.store, task.inputs, columns), [dropped_ids])
    return by_source.tally(left["source"], left["length"])


def after(parts: Sequence[Part], units: Sequence[Published]) -> list[Part]:
    """Return the partitions after a stage: without the documents it dropped, with those it rewrote (`Rewriter`)."""
    return [_after(part, unit) for part, unit in zip(parts, units, strict=True)]


def _after(part: Part, unit: Published) -> Part:
    count = unit.summary["documents"]
    files = unit.files
    if "documents" in files:  # the stage rewrote the remaining documents
        return replace(part, documents=files["documents"], keys=files["keys"], dropped=(), count=count)
    dropped = (*part.dropped, files["verdicts"]) if "verdicts" in files else part.dropped
    return replace(part, dropped=dropped, count=count)
