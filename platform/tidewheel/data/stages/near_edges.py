"""Near-deduplication, first half: find candidate pairs by their bands, and estimate the similarity of each pair.

Three shuffles: band rows by bucket, which gives pairs; pairs to the partition of their better document, which adds its
signature; pairs to the partition of the other document, which estimates the similarity from both signatures. Documents
of earlier dumps (`near_index`) take part as better documents only. Documents without shingles are compared by the hash
of their text.

A small random sample of pairs measures recall and precision (`near_exact`): candidates, and pairs that agree in the
first `SAMPLE_ROWS` values of the last band. Whether the other bands find such a pair does not depend on how it was
drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, verdicts
from tidewheel.data.config import DedupNearStep
from tidewheel.data.dedup import minhash
from tidewheel.data.stage import Published
from tidewheel.data.stages import drops, histograms, near_index
from tidewheel.data.stages.drops import part_tasks
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.near_index import Index
from tidewheel.data.stages.partition import Part, load_keys
from tidewheel.versions import Version

STAGE = "dedup_near_edges"
VERSION = Version("near_edges", uses=(near_index.VERSION, drops.VERSION, histograms.VERSION))
BANDS = pa.schema([*dedup.BAND_SCHEMA, ("bucket", pa.int32())])
PAIRS = pa.schema([*dedup.EDGE_SCHEMA, ("found", pa.bool_()), ("sampled", pa.bool_()), ("part_a", pa.int32())])
SAMPLE = pa.schema([*dedup.SCORED_EDGE_SCHEMA, ("found", pa.bool_()), ("sampled", pa.bool_()), ("others", pa.bool_())])
SAMPLE_DOCUMENTS = 8192
"""Approximate number of documents in the band of the sample."""
SAMPLE_PAIRS = 4096
"""Approximate number of pairs of either kind that are measured."""
SAMPLE_ROWS = 3
EXACT_DOUBT = 4.0
"""Standard errors below the threshold within which exact verification still compares a pair."""
_PAIRS_AT_ONCE = 65_536
_COLUMNS = ("id", "priority", "quality", "length", "hash_hi", "hash_lo", "shingles", "signature")
_LOOKED_UP = ("id", "hash_hi", "hash_lo", "shingles", "signature")


def run(job: Job, runner: Runner, parts: Sequence[Part]) -> tuple[Finished, list[Task]]:
    """Find the pairs that may be similar enough, partitioned by their worse document.

    A unit has the files `edges` (`dedup.SCORED_EDGE_SCHEMA`, in order of b and a) and `sample` (`SAMPLE`).

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.

    Returns:
        The units, and their tasks.
    """
    step = job.config.step("dedup_near")
    every = max(sum(part.count for part in parts) // SAMPLE_DOCUMENTS, 1)
    settings = [near_index.parameters(step), every, [index.hash for index in job.indexes]]
    todo = part_tasks(job, STAGE, parts, settings=settings, version=VERSION, together=True,
                      more={"every": every})
    done = runner.complete(STAGE, todo, functools.partial(_find, job, step, todo))
    return done, todo


def _find(job: Job, step: DedupNearStep, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    pending = {task.unit.number: task for task in missing}
    by_number = {task.unit.number: task for task in todo}
    signed = pa.schema([*dedup.EDGE_SCHEMA, ("found", pa.bool_()), ("sampled", pa.bool_()),
                        ("signature", pa.binary(4 * step.num_permutations)), ("part_b", pa.int32())])
    hops = [
        Hop("bucket", functools.partial(candidates, step.bands, job.partitions), PAIRS),
        Hop("part_a", functools.partial(sign, by_number, job.indexes, job.partitions), signed),
        Hop("part_b", functools.partial(_estimate_pending, dict(pending), step, job.partitions)),
    ]
    sources = [*todo, *near_index.source_tasks(job, {"every": 0})]
    read = functools.partial(read_bands, step, job.indexes, job.partitions)
    for unit in shuffle_units(sources, read, BANDS, hops, job.partitions):
        del pending[unit.unit.number]
        yield unit
    for task in pending.values():  # no pair has its worse document in these partitions
        yield estimate(task, step, job.partitions, signed.empty_table())


def read_bands(step: DedupNearStep, indexes: Sequence[Index], partitions: int, task: Task) -> Iterator[pa.Table]:
    """Yield the band rows of one partition, or of one file of an index; `BANDS`.

    Args:
        step: settings of near-deduplication.
        indexes: indexes of earlier dumps.
        partitions: number of buckets.
        task: a partition, or one of `near_index.source_tasks`.
    """
    if "index" in task.inputs:
        table = indexes[task.inputs["index"]].read(task.inputs["file"], _COLUMNS)
    else:
        table = load_keys(task.store, task.inputs, _COLUMNS)
    for first in range(0, len(table), 65_536):
        yield from band_rows(table.slice(first, 65_536), step, partitions, task.inputs["every"])


def band_rows(table: pa.Table, step: DedupNearStep, partitions: int, every: int) -> Iterator[pa.Table]:
    """Yield rows of `BANDS`.

    A document with shingles has a row for each band; one without has its text hash as band `step.bands`. Band
    `step.bands + 1` is that of the sample.

    Args:
        table: key rows of documents (`_COLUMNS`).
        step: settings of near-deduplication.
        partitions: number of buckets.
        every: the sample takes one in `every` hash values; 0 for no sample.
    """
    def rows(documents: np.ndarray, bands: np.ndarray, hashes: np.ndarray) -> pa.Table:
        return pa.table({"band": pa.array(bands.astype(np.int32)), "hash": pa.array(hashes),
                         **{name: table[name].take(pa.array(documents)) for name, _ in dedup.ORDER_COLUMNS},
                         "bucket": pa.array(verdicts.partition_of(hashes, partitions))})

    has_shingles = table["shingles"].to_numpy() > 0
    long = np.flatnonzero(has_shingles)
    short = np.flatnonzero(~has_shingles)
    values = signatures(table)[long]
    hashes = minhash.band_hashes(values, bands=step.bands, rows=step.rows)
    yield rows(np.repeat(long, step.bands), np.tile(np.arange(step.bands), len(long)), hashes.reshape(-1))
    yield rows(short, np.full(len(short), step.bands), table["hash_hi"].to_numpy()[short])
    if every and step.bands > 1:
        start = (step.bands - 1) * step.rows
        count = min(SAMPLE_ROWS, step.rows)
        keys = minhash.band_hashes(np.ascontiguousarray(values[:, start : start + count]), bands=1, rows=count)[:, 0]
        sampled = keys % np.uint64(every) == 0
        yield rows(long[sampled], np.full(sampled.sum(), step.bands + 1), keys[sampled])


def signatures(table: pa.Table) -> np.ndarray:
    """Return the column `signature` as uint32 [n, k].

    If the table has the columns `shingles`, `hash_hi` and `hash_lo`, signatures of documents without shingles are made
    from their text hash.
    """
    column = table["signature"].combine_chunks()
    width = table.schema.field("signature").type.byte_width
    if not len(table):
        return np.zeros((0, width // 4), np.uint32)
    raw = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    values = raw.view("<u4").reshape(len(column), -1)
    if "shingles" in table.column_names:
        short = table["shingles"].to_numpy() == 0
        if short.any():
            hashes = np.stack([table[name].to_numpy()[short] for name in ("hash_hi", "hash_lo")], axis=1)
            values = values.copy()
            values[short] = minhash.text_signatures(hashes, values.shape[1])
    return values


def candidates(bands: int, partitions: int, _: int, table: pa.Table) -> pa.Table:
    """Return the pairs with an equal band in one bucket, each with the partition of its better document; `PAIRS`.

    Args:
        bands: number of bands.
        partitions: number of partitions.
        _: number of the bucket.
        table: band rows of the bucket, in any order.
    """
    tables = []
    sample = pc.greater(table["band"], bands)
    for rows, sampled in ((table.filter(pc.invert(sample)), False), (table.filter(sample), True)):
        pairs = dedup.band_candidates(rows.select(dedup.BAND_SCHEMA.names))
        pairs = pairs.filter(pc.invert(dedup.is_old(pairs["b"])))  # documents of earlier dumps are never dropped
        pairs = pairs.append_column("found", pa.array([not sampled] * len(pairs), pa.bool_()))
        tables.append(pairs.append_column("sampled", pa.array([sampled] * len(pairs), pa.bool_())))
    both = pa.concat_tables(tables)
    return both.append_column("part_a", pa.array(part_of(both["a"], partitions)))


def part_of(ids: pa.Array | pa.ChunkedArray, partitions: int) -> np.ndarray:
    """Return the partition of each id, int32 [n]; ids of earlier dumps have one too."""
    return verdicts.partition_of(verdicts.hash_ids(dedup.plain_ids(ids)), partitions)


def sign(tasks: Mapping[int, Task], indexes: Sequence[Index], partitions: int, partition: int, table: pa.Table
         ) -> pa.Table:
    """Return the distinct pairs of one partition with the signature of their better document.

    Pairs whose better document an earlier run dropped are left out.

    Args:
        tasks: tasks of the partitions, by number.
        indexes: indexes of earlier dumps.
        partitions: number of partitions.
        number: number of the partition of the better documents.
        table: pairs (`PAIRS`), in any order.

    Returns:
        The pairs, with the partition of their worse document as `part_b`.
    """
    pairs = table.group_by(["a", "b"]).aggregate([("found", "any"), ("sampled", "any")]).rename_columns(
        {"found_any": "found", "sampled_any": "sampled"})
    ids = pairs["a"].combine_chunks()
    known = load_keys(tasks[partition].store, tasks[partition].inputs, _LOOKED_UP)
    old = near_index.lookup(indexes, partition, partitions, ids, (*_LOOKED_UP, "kept"))
    if len(old):
        lost = old["id"].filter(pc.invert(old["kept"])).combine_chunks()
        pairs = pairs.filter(pc.invert(pc.is_in(ids, value_set=lost)))
        known = pa.concat_tables([known, old.drop_columns(["kept"]).cast(known.schema)])
    pairs = pairs.append_column("signature", _signed(tasks[partition], known, pairs["a"]))
    return pairs.append_column("part_b", pa.array(part_of(pairs["b"], partitions)))


def _signed(task: Task, known: pa.Table, ids: pa.ChunkedArray) -> pa.Array:
    rows = pc.index_in(ids, value_set=known["id"].combine_chunks())
    assert rows.null_count == 0, f"{task.unit}: a pair names an unknown document"
    values = signatures(known.take(rows))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 * values.shape[1]) if len(values) else
                                                known.schema.field("signature").type, len(values),
                                                [None, pa.py_buffer(values.astype("<u4").tobytes())])


def _estimate_pending(pending: Mapping[int, Task], step: DedupNearStep, partitions: int, partition: int, table: pa.Table
                      ) -> Published | None:
    return estimate(pending[partition], step, partitions, table) if partition in pending else None


def doubtful(step: DedupNearStep) -> tuple[float, float]:
    """Return the range [low, high) of estimates that exact comparison decides; pairs below it are rejected."""
    error = float(np.sqrt(step.min_jaccard * (1 - step.min_jaccard) / step.num_permutations))
    if step.verify == "exact":
        return step.min_jaccard - EXACT_DOUBT * error, np.inf
    return step.min_jaccard - step.doubt * error, step.min_jaccard + step.doubt * error


def estimate(task: Task, step: DedupNearStep, partitions: int, table: pa.Table) -> Published:
    """Publish the unit of one partition: pairs that are similar enough or in doubt, and its part of the sample.

    Args:
        task: the partition of the worse documents.
        step: settings of near-deduplication.
        partitions: number of partitions.
        table: pairs with the signature of their better document, in any order.
    """
    table = table.sort_by([("b", "ascending"), ("a", "ascending")])
    scores = np.zeros(len(table))
    shares_other_band = np.zeros(len(table), bool)
    known = load_keys(task.store, task.inputs, _LOOKED_UP) if len(table) else table
    for first in range(0, len(table), _PAIRS_AT_ONCE):
        piece = table.slice(first, _PAIRS_AT_ONCE)
        a = signatures(piece)
        b = signatures(pa.table({"signature": _signed(task, known, piece["b"])}))
        scores[first : first + len(piece)] = minhash.estimated_jaccard(a, b)
        rest = (step.bands - 1) * step.rows
        equal = (a[:, :rest] == b[:, :rest]).reshape(len(a), step.bands - 1, step.rows)
        shares_other_band[first : first + len(piece)] = equal.all(axis=2).any(axis=1)
    pairs = pa.table([table["a"], table["b"], pa.array(scores), table["found"], table["sampled"],
                      pa.array(shares_other_band)], schema=SAMPLE)
    found_pairs = pairs.filter(pairs["found"])
    scored_pairs = found_pairs.filter(pc.greater_equal(found_pairs["score"], doubtful(step)[0]))
    edges = scored_pairs.select(dedup.SCORED_EDGE_SCHEMA.names)
    writer = task.writer()
    writer.table("edges", edges)
    sample = _sample(pairs, -(-SAMPLE_PAIRS // partitions))
    writer.table("sample", sample)
    measured = found_pairs["score"].to_numpy()
    return writer.publish({"candidates": len(found_pairs), "edges": len(edges), "sample": len(sample), "histograms": {
        "jaccard": histograms.histogram("jaccard", measured, (step.min_jaccard, None))}})


def _sample(pairs: pa.Table, count: int) -> pa.Table:
    """Return the `count` found and the `count` sampled pairs with the lowest hashes, without earlier dumps."""
    pairs = pairs.filter(pc.invert(dedup.is_old(pairs["a"])))
    order = np.argsort(verdicts.hash_ids(pairs["a"], 1) ^ verdicts.hash_ids(pairs["b"], 2), kind="stable")
    chosen = [order[pairs[name].to_numpy()[order]][:count] for name in ("found", "sampled")]
    return pairs.take(pa.array(np.unique(np.concatenate(chosen))))
