"""Near-deduplication: compute exact Jaccard similarities of pairs whose estimate is in doubt, and of a sample.

A shingle set is sent once for each document and partition that needs it, from the better document's partition to the
worse one's. The sample measures how well the bands find pairs and how well estimates judge them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import text
from tidewheel.data.config import DedupNearStep
from tidewheel.data.dedup import banding, minhash
from tidewheel.data.stage import Published, Unit, read_table, unit_key
from tidewheel.data.stages import near_edges, near_index
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.near_index import Index
from tidewheel.data.stages.near_shingles import sets_of
from tidewheel.versions import Version

STAGE = "dedup_near_exact"
VERSION = Version("near_exact", uses=(near_edges.VERSION, text.VERSION))
ASKED = pa.schema([("a", pa.string()), ("part_a", pa.int32()), ("part_b", pa.int32())])
SETS = pa.schema([("a", pa.string()), ("shingle_set", pa.large_binary()), ("part_b", pa.int32())])
BINS = 20
"""Bins of exact similarity, each 0.05 wide."""
MEASURES = ("pairs", "found", "expected", "candidates", "accepted", "duplicates", "right")


def run(job: Job, runner: Runner, tasks: Sequence[Task], edges: Sequence[Published]) -> Finished:
    """Verify the pairs in doubt and measure the sample; without pairs there are no units.

    Args:
        job: what the stage works on.
        runner: completes the units.
        tasks: tasks of `near_edges.run`.
        edges: units of `near_edges.run`.

    Returns:
        Units with the verified edges in the file `edges`.
    """
    step = job.config.step("dedup_near")
    if not any(unit.summary["sample"] or unit.summary["edges"] for unit in edges):
        return Finished([], 0, 0.0)
    inputs = unit_key(STAGE, settings="", version=None, inputs=[part for unit in edges for part in unit.content()])
    settings = near_index.parameters(step)
    todo = [
        Task(job.output, Unit(STAGE, task.unit.label, unit_key(
            STAGE, settings=[settings, task.unit.number, [index.hash for index in job.indexes]],
            version=VERSION,
            inputs=[inputs, task.inputs["documents"].hash, *(stamp.hash for stamp in task.inputs["dropped"])]),
            task.unit.number), {**task.inputs, "edges": unit.files["edges"], "sample": unit.files["sample"]})
        for task, unit in zip(tasks, edges, strict=True)
    ]
    return runner.complete(STAGE, todo, functools.partial(_compare, job, step, todo))


def _compare(job: Job, step: DedupNearStep, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    pending = {task.unit.number: task for task in missing}
    by_number = {task.unit.number: task for task in todo}
    hops = [Hop("part_a", functools.partial(send, by_number, job.indexes, step, job.partitions), SETS),
            Hop("part_b", functools.partial(_compare_pending, dict(pending), step))]
    for unit in shuffle_units(missing, functools.partial(ask, step, job.partitions), ASKED, hops, job.partitions):
        del pending[unit.unit.number]
        yield unit
    for task in pending.values():  # these partitions have no pair in doubt or in the sample
        yield compare(task, step, SETS.empty_table())


def pairs_of(task: Task, step: DedupNearStep) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return (pairs that are similar enough, pairs in doubt, pairs of the sample) of one partition."""
    edges = read_table(task.store, task.inputs["edges"])
    sure = pc.greater_equal(edges["score"], near_edges.doubtful(step)[1])
    return edges.filter(sure), edges.filter(pc.invert(sure)), read_table(task.store, task.inputs["sample"])


def ask(step: DedupNearStep, partitions: int, task: Task) -> Iterator[pa.Table]:
    """Yield the better documents whose shingle sets a partition needs; `ASKED`.

    Args:
        step: settings of near-deduplication.
        partitions: number of partitions.
        task: the partition.
    """
    _, doubted, sample = pairs_of(task, step)
    ids = pa.chunked_array([*doubted["a"].chunks, *sample["a"].chunks], pa.string()).unique()
    yield pa.table([ids, pa.array(near_edges.part_of(ids, partitions)),
                    pa.array(np.full(len(ids), task.unit.number, np.int32))], schema=ASKED)


def send(tasks: Mapping[int, Task], indexes: Sequence[Index], step: DedupNearStep, partitions: int, partition: int,
         table: pa.Table) -> pa.Table:
    """Return the shingle sets that other partitions request from one partition; `SETS`.

    Args:
        tasks: tasks of the partitions, by number.
        indexes: indexes of earlier dumps.
        step: settings of near-deduplication.
        partitions: number of partitions.
        number: number of the partition that has the documents.
        table: requests (`ASKED`), in any order.
    """
    ids = table["a"].combine_chunks()
    sets: dict[str, bytes] = {name: shingles.astype("<u4").tobytes() for name, shingles in
                              sets_of(tasks[partition], ids.unique(), step.ngram, step.unit)}
    old = near_index.lookup(indexes, partition, partitions, ids.unique(), ("id", "shingle_set"))
    if len(old):
        sets.update(zip(old["id"].to_pylist(), old["shingle_set"].to_pylist(), strict=True))
    column = pa.array([sets[name] for name in ids.to_pylist()], pa.large_binary())
    return pa.table([ids, column, table["part_b"]], schema=SETS)


def _compare_pending(pending: Mapping[int, Task], step: DedupNearStep, partition: int, table: pa.Table) -> Published:
    return compare(pending[partition], step, table)


def compare(task: Task, step: DedupNearStep, table: pa.Table) -> Published:
    """Publish the unit of one partition.

    Args:
        task: the partition of the worse documents.
        step: settings of near-deduplication.
        table: shingle sets of the better documents (`SETS`).
    """
    better = {name: np.frombuffer(data, "<u4") for name, data in
              zip(table["a"].to_pylist(), table["shingle_set"].to_pylist(), strict=True)}
    sure, doubted, sample = pairs_of(task, step)
    ids = pa.chunked_array([*doubted["b"].chunks, *sample["b"].chunks], pa.string()).unique()
    worse = dict(sets_of(task, ids, step.ngram, step.unit))
    writer = task.writer()
    exact = similarities(doubted, better, worse)
    edges = doubted.set_column(2, "score", pa.array(exact)).filter(pa.array(exact >= step.min_jaccard))
    edges = pa.concat_tables([sure, edges]).sort_by([("b", "ascending"), ("a", "ascending")])
    writer.table("edges", edges)
    return writer.publish({"compared": len(doubted), "edges": len(edges),
                           "sample": measure(sample, similarities(sample, better, worse), step)})


def similarities(pairs: pa.Table, better: Mapping[str, np.ndarray], worse: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the exact Jaccard similarity of each pair, float64 [n].

    The similarity of two documents without shingles is 1 if their texts are equal, else 0.

    Args:
        pairs: n pairs, with the columns a, b and score.
        better: shingle sets of the better documents, by id.
        worse: shingle sets of the worse documents, by id.
    """
    values = np.zeros(len(pairs))
    rows = zip(pairs["a"].to_pylist(), pairs["b"].to_pylist(), pairs["score"].to_pylist(), strict=True)
    for row, (a, b, score) in enumerate(rows):
        short = not len(better[a]) and not len(worse[b])
        values[row] = float(score == 1.0) if short else minhash.exact_jaccard(better[a], worse[b])
    return values


def measure(sample: pa.Table, exact: np.ndarray, step: DedupNearStep) -> dict[str, Any]:
    """Return counts of the sample by bin of exact similarity: lists of `BINS` numbers.

    Of the pairs drawn independently of the other bands: `pairs`; pairs that the other bands `found`; and the number
    `expected` by the S-curve of bands - 1 at their similarities. Of the candidates: `candidates` and `accepted`; of the
    accepted ones, `duplicates` reach min_jaccard, and `right` come within 0.05 of it.

    Args:
        sample: n pairs (`near_edges.SAMPLE`).
        exact: their exact similarities, float64 [n].
        step: settings of near-deduplication.
    """
    bins = np.minimum((exact * BINS + 1e-9).astype(np.int64), BINS - 1)
    sampled, found, others = (sample[name].to_numpy() for name in ("sampled", "found", "others"))
    expected = banding.collision_probability(exact, step.bands - 1, step.rows)
    score = sample["score"].to_numpy()
    low, high = near_edges.doubtful(step)
    accepted = found & (score >= low) & (np.where(score < high, exact, score) >= step.min_jaccard)
    weights = {"pairs": sampled, "found": sampled & others, "expected": sampled * expected, "candidates": found,
               "accepted": accepted, "duplicates": accepted & (exact >= step.min_jaccard),
               "right": accepted & (exact >= step.min_jaccard - 0.05)}
    return {name: np.round(np.bincount(bins, weights[name].astype(np.float64), BINS), 6).tolist()
            for name in MEASURES}


def report(parts: Sequence[Mapping[str, Sequence[float]]], step: DedupNearStep) -> dict[str, Any]:
    """Return recall and precision of the sample, in total and by bin; {} without a sample."""
    if not parts:
        return {}
    total = {name: np.sum([part[name] for part in parts], axis=0) for name in MEASURES}
    bins = []
    for index in range(BINS):
        row = {name: round(float(total[name][index]), 3) for name in MEASURES}
        low = index / BINS
        high = (index + 1) / BINS
        curve = float(np.mean(banding.collision_probability(np.linspace(low, high, 21), step.bands, step.rows)))
        bins.append({"from": low, "to": high, "curve": round(curve, 4), "recall": _as_all_bands(row, "found", step),
                     "expected_recall": _as_all_bands(row, "expected", step), **row})
    accepted = float(total["accepted"].sum())
    return {"bins": bins, "accepted": accepted,
            "precision": round(float(total["duplicates"].sum()) / accepted, 4) if accepted else None,
            "precision_within_0.05": round(float(total["right"].sum()) / accepted, 4) if accepted else None}


def _as_all_bands(row: Mapping[str, float], name: str, step: DedupNearStep) -> float | None:
    """Return the recall of all bands from that of all but one, assuming independent bands; None without pairs."""
    if not row["pairs"] or step.bands < 2:
        return None
    missed = 1 - row[name] / row["pairs"]
    return round(1 - max(missed, 0.0) ** (step.bands / (step.bands - 1)), 4)
