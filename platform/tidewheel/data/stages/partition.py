"""Stage 2: documents of all files -> partitions by id, sorted by id, one document an id.

From here on neither file order nor file boundaries are visible. A partition has two files: `documents`
(id, text, source, meta) and `keys`, the small columns that deduplication works on.
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
#: Which of several records with one id is the document: the order of deduplication, then anything that is stable.
_ORDER = (("id", "ascending"), ("priority", "descending"), ("length", "descending"), ("hash_hi", "ascending"),
          ("hash_lo", "ascending"), ("text", "ascending"), ("source", "ascending"), ("offset", "ascending"),
          ("meta", "ascending"))


@dataclass(frozen=True)
class Part:
    """One partition as the next stage finds it.

    Args:
        number: which one.
        documents, keys: its files.
        dropped: verdict files of the stages since; documents with the verdict "drop" are gone.
        count: documents that are left.
    """

    number: int
    documents: Stamp
    keys: Stamp
    dropped: tuple[Stamp, ...]
    count: int

    def inputs(self) -> dict[str, Any]:
        """For the inputs of a `Task`."""
        return {"documents": self.documents, "keys": self.keys, "dropped": list(self.dropped), "count": self.count}

    def content(self) -> list[str]:
        """Identities of its files, for unit keys."""
        return [stamp.hash for stamp in (self.documents, self.keys, *self.dropped)]


def load_keys(place: Store, inputs: Mapping[str, Any], columns: tuple[str, ...] | None = None) -> pa.Table:
    """Key columns (all by default) of the documents that are left in a part (`Part.inputs`), sorted by id."""
    return _left(place, inputs, read_table(place, inputs["keys"], columns))


def load_documents(place: Store, inputs: Mapping[str, Any]) -> Iterator[pa.Table]:
    """The documents that are left in a part, in order of id, a few thousand at a time."""
    gone = _dropped(place, inputs)
    left = 0
    for batch in read_batches(place, inputs["documents"]):
        table = verdicts.without(pa.Table.from_batches([batch]), gone)
        left += len(table)
        if len(table):
            yield table
    assert left == inputs["count"], f"{left} documents are left where {inputs['count']} were counted"


def _left(place: Store, inputs: Mapping[str, Any], table: pa.Table) -> pa.Table:
    table = verdicts.without(table, _dropped(place, inputs))
    assert len(table) == inputs["count"], f"{len(table)} documents are left where {inputs['count']} were counted"
    return table


def _dropped(place: Store, inputs: Mapping[str, Any]) -> list[pa.ChunkedArray]:
    return [verdicts.dropped_ids(verdicts.decode(read_file(place, stamp), ["id", "verdict"]))
            for stamp in inputs["dropped"]]


def tasks(job: Job, units: list[Published]) -> list[Task]:
    """One for each partition; the key covers what all files hold, not their number, names or order."""
    inputs = sorted(unit.files["documents"].hash for unit in units)
    sizes = ingest.schema(_permutations(job))
    urls = job.config.step("dedup_url") is not None
    version = VERSION.using(url.VERSION) if urls else VERSION
    return [
        Task(job.output, Unit(STAGE, f"part-{number:05d}", unit_key(
            STAGE, settings=[number, job.partitions, str(sizes), urls], version=version, inputs=inputs), number),
            {"urls": urls})
        for number in range(job.partitions)
    ]


def _permutations(job: Job) -> int:
    near = job.config.step("dedup_near")
    return near.num_permutations if near else 0


def run(job: Job, runner: Runner, units: list[Published]) -> tuple[Finished, list[Part]]:
    """Partition the documents of the ingested files.

    Raises:
        InputError: too many records share an id without being the same document.
    """
    rows = ingest.schema(_permutations(job)).append(pa.field("partition", pa.int32()))
    todo = tasks(job, units)
    sources = [Task(job.output, unit.unit, {"documents": unit.files["documents"], "partitions": job.partitions})
               for unit in units if unit.summary["documents"]]

    def execute(missing: list[Task]) -> Iterator[Published]:
        wanted = {task.unit.number: task for task in missing}
        only = [Task(task.output, task.unit, {**task.inputs, "wanted": sorted(wanted)}) for task in sources]
        if only:
            hop = Hop("partition", functools.partial(_publish_wanted, dict(wanted)))
            for unit in shuffle_units(only, read_ingested, rows, [hop], job.partitions):
                del wanted[unit.unit.number]
                yield unit
        for task in wanted.values():  # no document has such an id
            yield publish(task, rows.empty_table())

    done = runner.complete(STAGE, todo, execute)
    _check_share(job, units, done.units)
    return done, [Part(unit.unit.number, unit.files["documents"], unit.files["keys"], (), unit.summary["documents"])
                  for unit in done.units]


def _publish_wanted(wanted: Mapping[int, Task], number: int, table: pa.Table) -> Published:
    return publish(wanted[number], table)


def read_ingested(task: Task) -> Iterator[pa.Table]:
    """Rows of one ingested file with their partition number, those of wanted partitions, in blocks of bounded size."""
    wanted = np.array(task.inputs["wanted"], np.int32)
    everything = len(wanted) == task.inputs["partitions"]
    block: list[pa.Table] = []
    for batch in read_batches(task.store, task.inputs["documents"]):
        table = pa.Table.from_batches([batch])
        numbers = verdicts.partition_of(verdicts.hash_ids(table["id"]), task.inputs["partitions"])
        table = table.append_column("partition", pa.array(numbers))
        block.append(table if everything else table.filter(pa.array(np.isin(numbers, wanted))))
        if sum(part.nbytes for part in block) >= _BLOCK_BYTES:
            yield pa.concat_tables(block)
            block = []
    if block:
        yield pa.concat_tables(block)


def publish(task: Task, table: pa.Table) -> Published:
    """The unit of one partition, from its rows in any order."""
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
    found = table.select(names).append_column("head", keys.heads(table["text"]))
    for name, values in (keys.urls(table["meta"]) if urls else {}).items():
        found = found.append_column(name, values)
    return found


def _repeats(table: pa.Table) -> np.ndarray:
    """True for rows with the id of the row before."""
    repeated = np.zeros(len(table), bool)
    if len(table) > 1:
        ids = table["id"].combine_chunks()
        repeated[1:] = pc.equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    return repeated


def _judge(table: pa.Table, rows: np.ndarray) -> tuple[pa.Table, list[Bad]]:
    """Of records that share an id the same text is one document; other text cannot go by that id: quarantine."""
    ids, texts, metas = table["id"], table["text"], table["meta"]
    same: list[tuple[str, str]] = []
    bad: list[Bad] = []
    first: dict[str, str] = {}
    for row in rows.tolist():
        identity, text = ids[row].as_py(), texts[row].as_py()
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
            mend=f"see {job.output}/quarantine; name another field with read.id, or set it to null to name documents "
                 "by their content")
