"""Stage 2: documents of all files -> partitions by id, sorted by id, with one document for each id.

From here on neither the order nor the boundaries of files are visible. A partition has two files: `documents` (id,
text, source, meta) and `keys`, the small columns that deduplication works on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import document, quarantine, url, verdicts
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.quarantine import Bad, bad_record
from tidewheel.data.stage import Published, Unit, read_batches, read_file, read_table, unit_key
from tidewheel.data.stages import by_source, ingest, keys
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.errors import InputError
from tidewheel.storage import Stamp, Store
from tidewheel.versions import Version

STAGE = "partition"
VERSION = Version("partition", uses=(document.VERSION, quarantine.VERSION, verdicts.VERSION, keys.VERSION,
                                     by_source.VERSION))
_BLOCK_BYTES = 32 << 20
_KEYS = ("id", "source", "priority", "quality", "length", "hash_hi", "hash_lo", "shingles", "signature")
_ORDER = (("id", "ascending"), ("priority", "descending"), ("length", "descending"), ("hash_hi", "ascending"),
          ("hash_lo", "ascending"), ("text", "ascending"), ("source", "ascending"), ("offset", "ascending"),
          ("meta", "ascending"))
"""Of several records with the same id, the first is the document: the order of deduplication, then stable columns."""


@dataclass(frozen=True)
class Part:
    """A partition between two stages.

    Args:
        number: number of the partition.
        documents: file with the documents.
        keys: file with the key columns.
        dropped: verdict files of later stages; documents with the verdict "drop" are gone.
        count: number of remaining documents.
    """

    number: int
    documents: Stamp
    keys: Stamp
    dropped: tuple[Stamp, ...]
    count: int

    def inputs(self) -> dict[str, Any]:
        """Return the partition as inputs of a `Task`."""
        return {"documents": self.documents, "keys": self.keys, "dropped": list(self.dropped), "count": self.count}

    def content(self) -> list[str]:
        """Return the hashes of the files, for unit keys."""
        return [stamp.hash for stamp in (self.documents, self.keys, *self.dropped)]


def load_keys(output: Store, inputs: Mapping[str, Any], columns: tuple[str, ...] | None = None) -> pa.Table:
    """Return key columns of the remaining documents of a partition, sorted by id.

    Args:
        output: the pipeline's output.
        inputs: `Part.inputs` of the partition.
        columns: names of the columns; None for all.
    """
    table = verdicts.without(read_table(output, inputs["keys"], columns), _dropped(output, inputs))
    assert len(table) == inputs["count"], f"{len(table)} documents are left, but {inputs['count']} were counted"
    return table


def load_documents(output: Store, inputs: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Yield the remaining documents of a partition (`Part.inputs`) in order of id, a few thousand at a time."""
    dropped_ids = _dropped(output, inputs)
    left = 0
    for batch in read_batches(output, inputs["documents"]):
        table = verdicts.without(pa.Table.from_batches([batch]), dropped_ids)
        left += len(table)
        if len(table):
            yield table
    assert left == inputs["count"], f"{left} documents are left, but {inputs['count']} were counted"


def _dropped(output: Store, inputs: Mapping[str, Any]) -> list[pa.ChunkedArray]:
    return [verdicts.dropped_ids(verdicts.decode(read_file(output, stamp), ["id", "verdict"]))
            for stamp in inputs["dropped"]]


def tasks(job: Job, units: list[Published]) -> list[Task]:
    """Return a task for each partition. Its key covers the content of all files, not their number, names or order."""
    inputs = sorted(unit.files["documents"].hash for unit in units)
    sizes = ingest.schema(_permutations(job))
    urls = job.config.step("dedup_url") is not None
    version = VERSION.using(url.VERSION) if urls else VERSION
    return [
        Task(job.output, Unit(STAGE, f"part-{partition:05d}", unit_key(
            STAGE, settings=[partition, job.partitions, str(sizes), urls], version=version, inputs=inputs), partition),
            {"urls": urls})
        for partition in range(job.partitions)
    ]


def _permutations(job: Job) -> int:
    near = job.config.step("dedup_near")
    return near.num_permutations if near else 0


def run(job: Job, runner: Runner, units: list[Published]) -> tuple[Finished, list[Part]]:
    """Partition the documents of the ingested files.

    Args:
        job: what the stage works on.
        runner: completes the units.
        units: units of the ingest stage.

    Returns:
        The units, and the partitions.

    Raises:
        InputError: too many records share an id with a different document.
    """
    rows = ingest.schema(_permutations(job)).append(pa.field("partition", pa.int32()))
    todo = tasks(job, units)
    sources = [Task(job.output, unit.unit, {"documents": unit.files["documents"], "partitions": job.partitions})
               for unit in units if unit.summary["documents"]]

    def execute(missing: list[Task]) -> Iterator[Published]:
        pending = {task.unit.number: task for task in missing}
        reading = [Task(task.output, task.unit, {**task.inputs, "wanted": sorted(pending)}) for task in sources]
        if reading:
            hop = Hop("partition", functools.partial(_publish_pending, dict(pending)))
            for unit in shuffle_units(reading, read_ingested, rows, [hop], job.partitions):
                del pending[unit.unit.number]
                yield unit
        for task in pending.values():  # these partitions have no document
            yield publish(task, rows.empty_table())

    done = runner.complete(STAGE, todo, execute)
    _check_share(job, units, done.units)
    return done, [Part(unit.unit.number, unit.files["documents"], unit.files["keys"], (), unit.summary["documents"])
                  for unit in done.units]


def _publish_pending(pending: Mapping[int, Task], partition: int, table: pa.Table) -> Published:
    return publish(pending[partition], table)


def read_ingested(task: Task) -> Iterator[pa.Table]:
    """Yield the rows of one ingested file that belong to missing partitions, with their partition number.

    The blocks have a bounded size.
    """
    missing = np.array(task.inputs["wanted"], np.int32)
    everything = len(missing) == task.inputs["partitions"]
    block: list[pa.Table] = []
    for batch in read_batches(task.store, task.inputs["documents"]):
        table = pa.Table.from_batches([batch])
        numbers = verdicts.partition_of(verdicts.hash_ids(table["id"]), task.inputs["partitions"])
        table = table.append_column("partition", pa.array(numbers))
        block.append(table if everything else table.filter(pa.array(np.isin(numbers, missing))))
        if sum(part.nbytes for part in block) >= _BLOCK_BYTES:
            yield pa.concat_tables(block)
            block = []
    if block:
        yield pa.concat_tables(block)


def publish(task: Task, table: pa.Table) -> Published:
    """Publish the unit of one partition, from its rows in any order."""
    writer = task.writer()
    table = table.take(pc.sort_indices(table, sort_keys=list(_ORDER)))
    repeated = _repeats(table)
    if repeated.any():
        dropped, bad = _judge(table, np.flatnonzero(repeated))
        kept = table.filter(pa.array(~repeated))
    else:
        dropped, bad, kept = verdicts.VERDICT_SCHEMA.empty_table(), [], table
    samples = verdicts.samples(dropped, kept.select(["id", "text"])) if len(dropped) else {}
    if len(dropped):
        writer.shared("verdicts", f"verdicts/{STAGE}", ".parquet", verdicts.encode(dropped))
    if bad:
        writer.shared("quarantine", "quarantine", ".jsonl", quarantine.encode(bad))
    writer.table("documents", kept.select(DOCUMENT_SCHEMA.names))
    writer.table("keys", _keys(kept, task.inputs.get("urls", False)))
    return writer.publish({
        "documents_in": len(table), "documents": len(kept), "dropped": verdicts.counts(dropped), "samples": samples,
        "quarantined": quarantine.count(bad), "bytes": int(kept["length"].to_numpy().sum()),
        "left": by_source.tally(kept["source"], kept["length"])})


def _keys(table: pa.Table, urls: bool) -> pa.Table:
    names = [name for name in _KEYS if name in table.column_names]
    selected = table.select(names).append_column("head", keys.heads(table["text"]))
    for name, values in (keys.urls(table["meta"]) if urls else {}).items():
        selected = selected.append_column(name, values)
    return selected


def _repeats(table: pa.Table) -> np.ndarray:
    """Return whether each row has the id of the row before, bool [n]."""
    repeated = np.zeros(len(table), bool)
    if len(table) > 1:
        ids = table["id"].combine_chunks()
        repeated[1:] = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    return repeated


def _judge(table: pa.Table, rows: np.ndarray) -> tuple[pa.Table, list[Bad]]:
    """Judge records that repeat an id: drop those with the same text, put those with another text in quarantine.

    Args:
        table: records sorted by id.
        rows: rows with the id of the row before.

    Returns:
        Verdicts, and records for quarantine.
    """
    ids, texts, metas = table["id"], table["text"], table["meta"]
    same: list[tuple[str, str]] = []
    bad: list[Bad] = []
    first: dict[str, str] = {}
    for row in rows.tolist():
        identity = ids[row].as_py()
        text = texts[row].as_py()
        if identity not in first:
            first[identity] = texts[row - 1].as_py()
        meta = json.loads(metas[row].as_py())
        if text == first[identity]:
            same.append((identity, json.dumps({"file": meta["_file"], "offset": meta["_offset"]})))
        else:
            bad.append(bad_record(meta["_file"], meta.get("_line", 0), table["offset"][row].as_py(), "duplicate_id",
                                  text.encode(), f"id {identity!r}; hash and head are those of the text"))
    same_ids = pa.array([identity for identity, _ in same], pa.string())
    dropped = verdicts.drops(same_ids, "same_document", scores=[1.0] * len(same), survivors=same_ids,
                             details=[detail for _, detail in same])
    return dropped, bad


def _check_share(job: Job, units: list[Published], parts: list[Published]) -> None:
    bad = sum(sum(part.summary["quarantined"].values()) for part in parts)
    total = sum(unit.summary["records"] for unit in units)
    if bad > job.config.max_bad_fraction * total:
        raise InputError(
            f"{bad} of {total} records have an id that another document has, more than the allowed share of "
            f"{job.config.max_bad_fraction:g}", where=job.input,
            fix=f"see {job.output}/quarantine; name another field with read.id, or set it to null to name documents "
                "by their content")
