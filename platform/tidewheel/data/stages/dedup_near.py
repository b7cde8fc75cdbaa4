"""Near-deduplication: bands meet, candidate pairs visit the signatures of both sides, verified edges decide.

Two stages. `dedup_near_edges` shuffles band rows, then pairs to the partition of their better document, where its
signature joins them, then to the partition of the other, where the similarity is estimated from both. Only
pairs that reach the threshold become edges. `dedup_near` decides from the edges alone, in one task today:
edges are few beside documents, and its output is cut by partition, so that it can be split later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, minhash, verdicts
from tidewheel.data.config import DedupNearStep
from tidewheel.data.stage import Published, code_version, read_table
from tidewheel.data.stages import histograms
from tidewheel.data.stages.drops import DROP_SCHEMA, after, part_tasks, shuffle_drops, with_partition
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_keys
from tidewheel.storage import store

STAGE, EDGES = "dedup_near", "dedup_near_edges"
REASON = "near_duplicate"
_MODULES = ("tidewheel.data.dedup", "tidewheel.data.minhash", "tidewheel.data.verdicts", "tidewheel.data.stage",
            "tidewheel.data.stages.drops", "tidewheel.data.stages.histograms", "tidewheel.data.stages.partition",
            "tidewheel.data.stages.dedup_near")
BANDS = dedup.BAND_SCHEMA.append(pa.field("bucket", pa.int32()))
PAIRS = dedup.EDGE_SCHEMA.append(pa.field("part_a", pa.int32()))


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the near-duplicates among the documents that are left."""
    step = job.config.step(STAGE)
    code = code_version(*_MODULES)
    more = {"partitions": job.partitions, "step": step.canonical()}
    todo = part_tasks(job, EDGES, parts, settings=step.canonical(), code=code, together=True, more=more)
    edges = runner.complete(EDGES, todo, functools.partial(_find_edges, job, step, todo))

    total = sum(unit.summary["edges"] for unit in edges.units)
    contents = [unit.files["edges"].hash for unit in edges.units]
    decide = part_tasks(job, STAGE, parts, settings=[contents], code=code, together=True, more=more)
    files = [unit.files["edges"] for unit in edges.units if unit.summary["edges"]]
    source = [Task(job.output, decide[0].unit, {"edges": files, "partitions": job.partitions})] if files else []
    done = runner.complete(STAGE, decide, lambda missing: shuffle_drops(
        source, read_losers, DROP_SCHEMA, [], missing, reason=REASON, partitions=job.partitions),
        note=f"{total} verified edges")
    return Finished([*done.units, *edges.units], done.reused + edges.reused, done.seconds + edges.seconds), after(
        parts, done.units)


def _find_edges(job: Job, step: DedupNearStep, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    wanted = {task.unit.number: task for task in missing}
    by_number = {task.unit.number: task for task in todo}
    width = 4 * step.num_permutations
    signed = pa.schema([*dedup.EDGE_SCHEMA, ("signature", pa.binary(width)), ("part_b", pa.int32())])
    hops = [
        Hop("bucket", functools.partial(candidates, job.partitions), PAIRS),
        Hop("part_a", functools.partial(sign, by_number, job.partitions), signed),
        Hop("part_b", functools.partial(verify, dict(wanted))),
    ]
    for unit in shuffle_units(todo, read_bands, BANDS, hops, job.partitions):
        del wanted[unit.unit.number]
        yield unit
    for task in wanted.values():  # no pair has its worse document there
        yield _verified(task, signed.empty_table())


def read_bands(task: Task) -> Iterator[pa.Table]:
    """Band rows of one partition: a row for each band of each document that has shingles."""
    step = task.inputs["step"]
    columns = ("id", "priority", "quality", "length", "shingles", "signature")
    table = load_keys(task.store, task.inputs, columns)
    table = table.filter(pc.greater(table["shingles"], 0))
    for first in range(0, len(table), 65_536):
        piece = table.slice(first, 65_536)
        hashes = minhash.band_hashes(_signatures(piece), bands=step["bands"], rows=step["rows"])
        rows = pa.array(np.repeat(np.arange(len(piece)), step["bands"]))
        flat = hashes.reshape(-1)
        yield pa.table({
            "band": pa.array(np.tile(np.arange(step["bands"], dtype=np.int32), len(piece))), "hash": pa.array(flat),
            **{name: piece[name].take(rows) for name in ("id", "priority", "quality", "length")},
            "bucket": pa.array(verdicts.partition_of(flat, task.inputs["partitions"]))})


def _signatures(table: pa.Table) -> np.ndarray:
    """The column `signature` as [n, k] uint32."""
    column = table["signature"].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column
    width = table.schema.field("signature").type.byte_width
    if not len(table):
        return np.zeros((0, width // 4), np.uint32)
    raw = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    return raw.view("<u4").reshape(len(column), -1)


def candidates(partitions: int, _: int, table: pa.Table) -> pa.Table:
    """Pairs that share a bucket of one bucket partition, each with the partition of its better document; `PAIRS`."""
    pairs = dedup.band_candidates(table.select(dedup.BAND_SCHEMA.names))
    numbers = verdicts.partition_of(verdicts.hash_ids(pairs["a"]), partitions)
    return pairs.append_column("part_a", pa.array(numbers))


def sign(tasks: Mapping[int, Task], partitions: int, number: int, table: pa.Table) -> pa.Table:
    """Distinct pairs of one partition with the signature of their better document, and the other's partition."""
    pairs = table.select(["a", "b"]).group_by(["a", "b"]).aggregate([])
    signatures = _lookup(tasks[number], pairs["a"])
    numbers = verdicts.partition_of(verdicts.hash_ids(pairs["b"]), partitions)
    return pairs.append_column("signature", signatures).append_column("part_b", pa.array(numbers))


def verify(wanted: Mapping[int, Task], number: int, table: pa.Table) -> Published | None:
    """`_verified`, unless that is published already."""
    return _verified(wanted[number], table) if number in wanted else None


def _verified(task: Task, table: pa.Table) -> Published:
    """The unit of one partition: pairs that are alike enough, as file `edges` (a, b, score), sorted."""
    scores = np.zeros(0)
    if len(table):
        table = table.sort_by([("a", "ascending"), ("b", "ascending")])
        other = pa.table({"signature": _lookup(task, table["b"])})
        scores = minhash.estimated_jaccard(_signatures(table), _signatures(other))
    least = task.inputs["step"]["min_jaccard"]
    edges = pa.table([table["a"], table["b"], pa.array(scores)], schema=dedup.SCORED_EDGE_SCHEMA)
    edges = edges.filter(pa.array(scores >= least))
    writer = task.writer()
    writer.table("edges", edges)
    return writer.publish({"candidates": len(table), "edges": len(edges),
                           "histograms": {"jaccard": histograms.histogram("jaccard", scores, (least, None))}})


def _lookup(task: Task, ids: Any) -> pa.ChunkedArray:
    """Signatures of documents of a partition."""
    keys = load_keys(task.store, task.inputs, ("id", "signature"))
    places = pc.index_in(ids, value_set=keys["id"].combine_chunks())
    assert places.null_count == 0, f"{task.unit}: a pair names a document that is not there"
    return keys["signature"].take(places)


def read_losers(task: Task) -> Iterator[pa.Table]:
    """What the edges decide, over all partitions."""
    place = store(task.output)
    edges = pa.concat_tables([read_table(place, stamp) for stamp in task.inputs["edges"]])
    yield with_partition(dedup.cluster(edges.combine_chunks()), task.inputs["partitions"])
