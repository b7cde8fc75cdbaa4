"""What every stage that drops documents has in common: verdicts for each partition, and the partitions after it."""

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
"""How a stage's verdicts on its partitions are written."""
#: Rows that a stage hands to `publish`: which document goes, for which better one, how alike; `partition` is the id's.
DROP_SCHEMA = pa.schema([("id", pa.string()), ("survivor", pa.string()), ("score", pa.float64()),
                         ("partition", pa.int32())])


def part_tasks(job: Job, stage: str, parts: Sequence[Part], *, settings: Any, version: Version, together: bool,
               more: Mapping[str, Any] | None = None) -> list[Task]:
    """One unit for each partition. `together`: its verdicts follow from all partitions, not from its own alone."""
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
    """Publish the `missing` partitions' verdicts: `hops` end in rows of `DROP_SCHEMA`, sent home to their partition."""
    wanted = {task.unit.number: task for task in missing}
    home = Hop("partition", functools.partial(_home, dict(wanted), reason))
    for unit in shuffle_units(sources, read, rows, [*hops, home], partitions) if sources else ():
        del wanted[unit.unit.number]
        yield unit
    for task in wanted.values():  # nothing of theirs is dropped
        yield publish_duplicates(task, reason, DROP_SCHEMA.empty_table())


def _home(wanted: Mapping[int, Task], reason: str, number: int, table: pa.Table) -> Published | None:
    return publish_duplicates(wanted[number], reason, table) if number in wanted else None


def with_partition(dropped: pa.Table, partitions: int) -> pa.Table:
    """`dedup.DROPPED_SCHEMA` with the partition of each id: `DROP_SCHEMA`."""
    numbers = verdicts.partition_of(verdicts.hash_ids(dropped["id"]), partitions)
    return dropped.append_column("partition", pa.array(numbers))


def publish_duplicates(task: Task, reason: str, table: pa.Table, writer: UnitWriter | None = None,
            costs: Mapping[str, Cost] | None = None) -> Published:
    """The unit of one partition of a deduplication, from its rows of `DROP_SCHEMA`.

    A survivor of an earlier dump is recorded by its id, and its index (of `against` in the inputs) in the detail.
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
    return ["" if number is None else json.dumps({"index": against[number]}) for number in numbers]


def publish(task: Task, judged: pa.Table, heads: pa.Table | None, summary: Mapping[str, Any] | None = None,
            writer: UnitWriter | None = None,
            costs: Mapping[str, Cost] | None = None) -> Published:
    """The unit of one partition, from its verdict rows.

    Args:
        task: the partition, `Part.inputs` among its inputs.
        judged: `VERDICT_SCHEMA`, any verdicts, sorted by id; at most one drop a document.
        heads: what `verdicts.samples` needs of the judged documents; None without any.
        summary: more counts of the stage.
        writer: with files of the unit that are written already, such as those of a `Rewriter`.
        costs: of the filters that judged.
    """
    writer = writer or task.writer()
    gone = verdicts.dropped_ids(judged)
    samples: dict[str, Any] = {}
    if len(judged):
        assert heads is not None
        assert len(gone.unique()) == len(gone), f"{task.unit}: a document is dropped twice"
        samples = verdicts.samples(judged, heads)
        writer.shared("verdicts", f"verdicts/{task.unit.stage}", ".parquet", verdicts.encode(judged))
    count = task.inputs["count"]
    return writer.publish({
        "documents_in": count, "documents": count - len(gone), "dropped": verdicts.counts(judged),
        "edits": verdicts.counts(judged, verdicts.EDIT), "edited": verdicts.edited(judged), "samples": samples,
        "left": _by_source(task, writer, gone), **(summary or {})}, costs)


def _by_source(task: Task, writer: UnitWriter, gone: pa.Array | pa.ChunkedArray) -> by_source.BySource:
    """What the stage leaves of its partition."""
    columns = ("id", "source", "length")
    if "keys" in writer.files:
        left = read_table(task.store, writer.files["keys"], columns)
    else:
        left = verdicts.without(load_keys(task.store, task.inputs, columns), [gone])
    return by_source.tally(left["source"], left["length"])


def after(parts: Sequence[Part], units: Sequence[Published]) -> list[Part]:
    """The partitions without what a stage dropped, and with what it rewrote (`Rewriter`)."""
    return [_after(part, unit) for part, unit in zip(parts, units, strict=True)]


def _after(part: Part, unit: Published) -> Part:
    count, files = unit.summary["documents"], unit.files
    if "documents" in files:  # these are the documents that are left
        return replace(part, documents=files["documents"], keys=files["keys"], dropped=(), count=count)
    dropped = (*part.dropped, files["verdicts"]) if "verdicts" in files else part.dropped
    return replace(part, dropped=dropped, count=count)
