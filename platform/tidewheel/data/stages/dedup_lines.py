"""Remove lines or paragraphs that several documents contain: shuffle their hashes, then rewrite the partitions.

A hash partition has one row for each distinct piece of each document (hash, id and order, no text), so memory is
bounded by the partition, however often a piece repeats.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, text, verdicts
from tidewheel.data.config import DedupLinesStep
from tidewheel.data.dedup import lines as dedup_lines
from tidewheel.data.stage import Published
from tidewheel.data.stages import drops, keys, outcomes, rewrite
from tidewheel.data.stages.drops import after, part_tasks, publish
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_documents, load_keys
from tidewheel.data.stages.rewrite import Rewriter
from tidewheel.versions import Version

STAGE = "dedup_lines"
REASON, EMPTY = "repeated_lines", "dedup_lines_nothing_left"
VERSION = Version("dedup_lines", uses=(dedup.VERSION, text.VERSION, drops.VERSION, outcomes.VERSION, rewrite.VERSION))
ROWS = dedup_lines.ROW_SCHEMA.append(pa.field("bucket", pa.int32()))
REPEATS = dedup_lines.REPEAT_SCHEMA.append(pa.field("partition", pa.int32()))


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Cut repeated lines or paragraphs out of the remaining documents.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.

    Returns:
        The units, and the partitions with the edited documents.
    """
    step: DedupLinesStep = job.config.step(STAGE)
    todo = part_tasks(job, STAGE, parts, settings=[step.decisive(), keys.minhash_settings(job.config)],
                      version=VERSION, together=True,
                      more={"partitions": job.partitions, "step": step.canonical()})
    done = runner.complete(STAGE, todo, functools.partial(_execute, job, todo))
    return done, after(parts, done.units)


def _execute(job: Job, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    step = job.config.step(STAGE)
    pending = {task.unit.number: task for task in missing}
    hops = [Hop("bucket", functools.partial(losers, job.partitions, step.max_repeats, step.keep), REPEATS),
            Hop("partition", functools.partial(_edit_pending, dict(pending)))]
    for unit in shuffle_units(todo, read_rows, ROWS, hops, job.partitions):
        del pending[unit.unit.number]
        yield unit
    for task in pending.values():  # these partitions have no repeated piece
        yield publish(task, verdicts.VERDICT_SCHEMA.empty_table(), None)


def read_rows(task: Task) -> Iterator[pa.Table]:
    """Yield a row for each piece of a partition's documents, with the bucket of its hash."""
    step = task.inputs["step"]
    order = load_keys(task.store, task.inputs, tuple(name for name, _ in dedup.ORDER_COLUMNS))
    first = 0
    for table in load_documents(task.store, task.inputs):  # documents and keys are both in order of id
        rows = dedup_lines.rows(table["text"], order.slice(first, len(table)), step["unit"], step["min_characters"])
        first += len(table)
        buckets = verdicts.partition_of(rows["hash_hi"].to_numpy(), task.inputs["partitions"])
        yield rows.append_column("bucket", pa.array(buckets))


def losers(partitions: int, max_repeats: int, keep: str, _: int, table: pa.Table) -> pa.Table:
    """Return the pieces of one bucket that documents lose, with the partition of each document; `REPEATS`.

    Args:
        partitions: number of partitions.
        max_repeats: documents that may contain the same piece.
        keep: setting `keep` of the step.
        _: number of the bucket.
        table: rows of the bucket, in any order.
    """
    repeats = dedup_lines.repeats(table.select(dedup_lines.ROW_SCHEMA.names), max_repeats=max_repeats, keep=keep)
    numbers = verdicts.partition_of(verdicts.hash_ids(repeats["id"]), partitions)
    return repeats.append_column("partition", pa.array(numbers))


def _edit_pending(pending: Mapping[int, Task], partition: int, table: pa.Table) -> Published | None:
    return edit(pending[partition], table.select(dedup_lines.REPEAT_SCHEMA.names)) if partition in pending else None


def edit(task: Task, repeated: pa.Table) -> Published:
    """Publish the documents and keys of one partition without the pieces in `repeated` (`REPEAT_SCHEMA`)."""
    step = task.inputs["step"]
    judged: list[pa.Table] = []
    heads = [outcomes.HEADS.empty_table()]
    with Rewriter(task) as rewriter:
        for table in load_documents(task.store, task.inputs):
            of_table = repeated.filter(pc.is_in(repeated["id"], value_set=table["id"].combine_chunks()))
            cut = dedup_lines.cut(table, of_table, step["unit"], step["min_characters"])
            empty = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(cut.texts)), 0).to_numpy(zero_copy_only=False)
            touched = cut.pieces > 0
            for verdict, reason, rows in ((verdicts.EDIT, REASON, np.flatnonzero(touched & ~empty)),
                                          (verdicts.DROP, EMPTY, np.flatnonzero(touched & empty))):
                judged.append(_verdicts(verdict, reason, table, cut, rows))
                heads.append(_heads(judged[-1], table, cut, rows))
            kept = pa.array(~(touched & empty))
            column = table.schema.get_field_index("text")
            after_cut = table.set_column(column, table.schema.field(column), cut.texts).filter(kept)
            if len(after_cut):
                rewriter.add(after_cut, touched[kept.to_numpy(zero_copy_only=False)])
    return publish(task, verdicts.merge(judged), pa.concat_tables(heads), writer=rewriter.writer)


def _verdicts(verdict: str, reason: str, table: pa.Table, cut: dedup_lines.Cut, rows: np.ndarray) -> pa.Table:
    """Return verdicts on documents that lost pieces: the number of pieces, and the document that keeps the first."""
    indices = pa.array(rows, pa.int64())
    before = pc.binary_length(table["text"].take(indices)).to_pylist()
    after_cut = pc.binary_length(cut.texts.take(indices)).to_pylist()
    details = [json.dumps({"pieces": pieces, "bytes_before": old, "bytes_after": new})
               for pieces, old, new in zip(cut.pieces[rows].tolist(), before, after_cut, strict=True)]
    return verdicts.rows(verdict, table["id"].take(indices), reason, details=details,
                         survivors=[cut.survivors[row] for row in rows.tolist()])


def _heads(judged: pa.Table, table: pa.Table, cut: dedup_lines.Cut, rows: np.ndarray) -> pa.Table:
    """Return the text around the first change of the documents that samples may show; `outcomes.HEADS`."""
    chosen = verdicts.sampled(judged)
    picked = judged.take(pa.array(chosen))
    changes = [verdicts.change(table["text"][row].as_py(), cut.texts[row].as_py()) for row in rows[chosen].tolist()]
    return pa.table([picked["id"], picked["reason"], pa.array([before for before, _ in changes], pa.string()),
                     pa.array([changed for _, changed in changes], pa.string())], schema=outcomes.HEADS)
