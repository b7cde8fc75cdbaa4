"""Near-deduplication: apply the greedy rule in rounds; each partition decides the edges of its own documents.

In a round, each partition asks the partitions of the better documents whether those are kept, and gets answers for the
decided ones. Each round is a durable stage. When few edges are left, one task decides the rest by the same rule, so
the result does not depend on that limit. No process ever holds all edges or ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup
from tidewheel.data.stage import Published, Unit, read_table, unit_key
from tidewheel.data.stages import near_edges
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.near_edges import part_of
from tidewheel.storage import Stamp
from tidewheel.versions import Version

STAGE = "dedup_near_round"
VERSION = Version("near_rounds", uses=(near_edges.VERSION,))
FEW_EDGES = 1_000_000
"""Open edges that one task decides; they take about 100 MB of its memory."""
ASKED = pa.schema([("id", pa.string()), ("owner", pa.int32()), ("asker", pa.int32())])
ANSWERS = pa.schema([*dedup.FATE_SCHEMA, ("asker", pa.int32())])


@dataclass(frozen=True)
class State:
    """State of one partition between rounds.

    Args:
        number: number of the partition.
        edges: file with the open edges; None for none.
        dropped: file with the dropped documents; None for none.
        open: number of open edges.
    """

    number: int
    edges: Stamp | None
    dropped: Stamp | None
    open: int

    def content(self) -> list[str]:
        """Return the hashes of the files, for unit keys."""
        return [stamp.hash if stamp else "" for stamp in (self.edges, self.dropped)]


def run(job: Job, runner: Runner, states: list[State], *, few: int | None = None) -> tuple[list[Finished], list[State]]:
    """Run rounds until few enough edges are open.

    Args:
        job: what the stage works on.
        runner: completes the units.
        states: states of the partitions.
        few: number of open edges at which to stop; `FEW_EDGES` by default.

    Returns:
        The units of each round, and the states after the last one.
    """
    few = FEW_EDGES if few is None else few
    done: list[Finished] = []
    while (left := sum(state.open for state in states)) > few:
        stage = f"{STAGE}_{len(done) + 1}"
        everything = [part for state in states for part in state.content()]
        inputs = unit_key(stage, settings="", version=None, inputs=everything)
        todo = [Task(job.output, Unit(stage, f"part-{state.number:05d}", unit_key(
            stage, settings=[state.number, job.partitions], version=VERSION, inputs=[inputs]),
            state.number), {"edges": state.edges, "dropped": state.dropped, "open": state.open}) for state in states]
        done.append(runner.complete(stage, todo, functools.partial(_round, job, todo), note=f"{left} open edges"))
        states = [State(unit.unit.number, unit.files.get("edges"), unit.files.get("dropped"), unit.summary["open"])
                  for unit in done[-1].units]
        after = sum(state.open for state in states)
        assert after < left, "edges contradict a total order: a round decided nothing"
    return done, states


def _round(job: Job, todo: list[Task], missing: list[Task]) -> Iterator[Published]:
    pending = {task.unit.number: task for task in missing}
    by_number = {task.unit.number: task for task in todo}
    hops = [Hop("owner", functools.partial(answer, by_number), ANSWERS),
            Hop("asker", functools.partial(_settle_pending, dict(pending)))]
    sources = [task for task in missing if task.inputs["open"]]
    for unit in shuffle_units(sources, functools.partial(ask, job.partitions), ASKED, hops, job.partitions):
        del pending[unit.unit.number]
        yield unit
    for task in pending.values():  # no edge is open there, or no answer came
        yield carry_on(task)


def ask(partitions: int, task: Task) -> Iterator[pa.Table]:
    """Yield the better documents that the open edges of a partition wait for; `ASKED`."""
    ids = read_table(task.store, task.inputs["edges"], ["a"])["a"].unique()
    yield pa.table([ids, pa.array(part_of(ids, partitions)),
                    pa.array(np.full(len(ids), task.unit.number, np.int32))], schema=ASKED)


def answer(tasks: Mapping[int, Task], partition: int, table: pa.Table) -> pa.Table:
    """Return the decisions on the documents that others ask one partition for; `ANSWERS`.

    Args:
        tasks: tasks of the partitions, by number.
        number: number of the partition that has the documents.
        table: questions (`ASKED`), in any order.
    """
    edges, dropped = load(tasks[partition])
    known = dedup.fates(table["id"].combine_chunks().unique(), edges, dropped)
    indices = pc.index_in(table["id"], value_set=known["id"].combine_chunks())
    rows = table.append_column("kept", pc.take(known["kept"].combine_chunks(), indices))
    return rows.filter(pc.is_valid(rows["kept"])).select(ANSWERS.names)


def load(task: Task) -> tuple[pa.Table, pa.Table]:
    """Return (open edges, dropped documents) of a partition before a round."""
    edges, dropped = (task.inputs[name] for name in ("edges", "dropped"))
    return (read_table(task.store, edges) if edges else dedup.SCORED_EDGE_SCHEMA.empty_table(),
            read_table(task.store, dropped) if dropped else dedup.DROPPED_SCHEMA.empty_table())


def _settle_pending(pending: Mapping[int, Task], partition: int, table: pa.Table) -> Published:
    task = pending[partition]
    edges, dropped = dedup.settle(*load(task), table.select(dedup.FATE_SCHEMA.names))
    writer = task.writer()
    writer.table("edges", edges)
    writer.table("dropped", dropped)
    return writer.publish({"open": len(edges)})


def carry_on(task: Task) -> Published:
    """Publish the unit of a partition without new decisions: its files stay the same."""
    writer = task.writer()
    for name in ("edges", "dropped"):
        if task.inputs[name]:
            writer.add(name, task.inputs[name])
    return writer.publish({"open": task.inputs["open"]})


def last(task: Task) -> pa.Table:
    """Return the documents that `dedup.cluster` drops, given all open edges; `dedup.DROPPED_SCHEMA`."""
    edges = pa.concat_tables([dedup.SCORED_EDGE_SCHEMA.empty_table(),
                              *(read_table(task.store, stamp) for stamp in task.inputs["edges"])]).combine_chunks()
    ids = pa.chunked_array([*edges["a"].chunks, *edges["b"].chunks], pa.string()).unique()
    known = [table.filter(pc.is_in(table["id"], value_set=ids)) for table in (
        read_table(task.store, stamp) for stamp in task.inputs["dropped"])]
    return dedup.cluster(edges, pa.concat_tables([dedup.DROPPED_SCHEMA.empty_table(), *known]))


def open_task(output: str, states: Sequence[State]) -> list[Task]:
    """Return the single task of `last`; [] if no edge is open."""
    edges = [state.edges for state in states if state.open and state.edges]
    dropped = [state.dropped for state in states if state.dropped]
    unit = Unit(STAGE, "last", "")
    return [Task(output, unit, {"edges": edges, "dropped": dropped})] if edges else []
