"""Lines and paragraphs that stand in several documents: hashes meet, and the losers' partitions are written anew.

A hash partition holds one row for each distinct piece of each document (hash, id and order, no text), so memory is
bounded by the partition, however often a piece is repeated elsewhere.
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
    """Cut repeated lines or paragraphs out of the documents that are left."""
    step: DedupLinesStep = job.config.step(STAGE)
    todo = part_tasks(job, STAGE, parts, settings=[step.decisive(), keys.minhash_settings(job.config)],
                      version=VERSION, together=True,
                      more={"partitions": job.partitions, "step": step.canonical()})
    done = runner.complete(STAGE, todo, functools.partial(_execute, job, todo))
    return done, after(parts, done.units)


def _execute(job: Job, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    step = job.config.step(STAGE)
    wanted = {task.unit.number: task for task in missing}
    hops = [Hop("bucket", functools.partial(losers, job.partitions, step.max_repeats, step.keep), REPEATS),
            Hop("partition", functools.partial(_home, dict(wanted)))]
    for unit in shuffle_units(todo, read_rows, ROWS, hops, job.partitions):
        del wanted[unit.unit.number]
        yield unit
    for task in wanted.values():  # nothing of theirs is repeated
        yield publish(task, verdicts.VERDICT_SCHEMA.empty_table(), None)


def read_rows(task: Task) -> Iterator[pa.Table]:
    """Rows of the pieces of one partition's documents, each with the bucket its hash falls into."""
    step = task.inputs["step"]
    order = load_keys(task.store, task.inputs, tuple(name for name, _ in dedup.ORDER_COLUMNS))
    first = 0
    for table in load_documents(task.store, task.inputs):  # both are in order of id
        rows = dedup_lines.rows(table["text"], order.slice(first, len(table)), step["unit"], step["min_characters"])
        first += len(table)
        buckets = verdicts.partition_of(rows["hash_hi"].to_numpy(), task.inputs["partitions"])
        yield rows.append_column("bucket", pa.array(buckets))


def losers(partitions: int, max_repeats: int, keep: str, _: int, table: pa.Table) -> pa.Table:
    """Who loses which piece of one bucket, with the partition of its document; `REPEATS`."""
    found = dedup_lines.repeats(table.select(dedup_lines.ROW_SCHEMA.names), max_repeats=max_repeats, keep=keep)
    numbers = verdicts.partition_of(verdicts.hash_ids(found["id"]), partitions)
    return found.append_column("partition", pa.array(numbers))


def _home(wanted: Mapping[int, Task], number: int, table: pa.Table) -> Published | None:
    return edit(wanted[number], table.select(dedup_lines.REPEAT_SCHEMA.names)) if number in wanted else None


def edit(task: Task, repeated: pa.Table) -> Published:
    """The unit of one partition: its documents and keys without the pieces in `repeated` (`REPEAT_SCHEMA`)."""
    step = task.inputs["step"]
    judged: list[pa.Table] = []
    heads = [outcomes.HEADS.empty_table()]
    with Rewriter(task) as rewriter:
        for table in load_documents(task.store, task.inputs):
            mine = repeated.filter(pc.is_in(repeated["id"], value_set=table["id"].combine_chunks()))
            found = dedup_lines.cut(table, mine, step["unit"], step["min_characters"])
            empty = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(found.texts)), 0).to_numpy(zero_copy_only=False)
            touched = found.pieces > 0
            for verdict, reason, rows in ((verdicts.EDIT, REASON, np.flatnonzero(touched & ~empty)),
                                          (verdicts.DROP, EMPTY, np.flatnonzero(touched & empty))):
                judged.append(_verdicts(verdict, reason, table, found, rows))
                heads.append(_heads(judged[-1], table, found, rows))
            kept = pa.array(~(touched & empty))
            place = table.schema.get_field_index("text")
            after_cut = table.set_column(place, table.schema.field(place), found.texts).filter(kept)
            if len(after_cut):
                rewriter.add(after_cut, touched[kept.to_numpy(zero_copy_only=False)])
    return publish(task, verdicts.merge(judged), pa.concat_tables(heads), writer=rewriter.writer)


def _verdicts(verdict: str, reason: str, table: pa.Table, found: dedup_lines.Cut, rows: np.ndarray) -> pa.Table:
    """Verdict rows of documents that lost pieces: how many, and who keeps the first of them."""
    places = pa.array(rows, pa.int64())
    before, now = (pc.binary_length(texts.take(places)).to_pylist() for texts in (table["text"], found.texts))
    details = [json.dumps({"pieces": pieces, "bytes_before": one, "bytes_after": other})
               for pieces, one, other in zip(found.pieces[rows].tolist(), before, now, strict=True)]
    return verdicts.rows(verdict, table["id"].take(places), reason, details=details,
                         survivors=[found.survivors[row] for row in rows.tolist()])


def _heads(judged: pa.Table, table: pa.Table, found: dedup_lines.Cut, rows: np.ndarray) -> pa.Table:
    """What samples show of these documents: the text around the first change; `outcomes.HEADS`."""
    chosen = verdicts.sampled(judged)
    picked = judged.take(pa.array(chosen))
    shown = [verdicts.change(table["text"][row].as_py(), found.texts[row].as_py()) for row in rows[chosen].tolist()]
    return pa.table([picked["id"], picked["reason"], pa.array([one for one, _ in shown], pa.string()),
                     pa.array([other for _, other in shown], pa.string())], schema=outcomes.HEADS)
