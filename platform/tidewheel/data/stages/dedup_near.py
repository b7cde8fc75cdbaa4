"""Near-deduplication: similar pairs are found (`near_edges`), verified (`near_exact`) and decided (`near_rounds`).

The rule is `dedup.cluster`'s. Every document that goes is recorded with the document it resembles, its score, and the
index that one is in when it belongs to an earlier dump.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, verdicts
from tidewheel.data.config import DedupNearStep
from tidewheel.data.stage import Published, read_table
from tidewheel.data.stages import drops, histograms, near_edges, near_exact, near_index, near_rounds
from tidewheel.data.stages.drops import DROP_SCHEMA, after, part_tasks, publish_duplicates, with_partition
from tidewheel.data.stages.execute import Finished, Hop, Runner, Task, map_units, shuffle_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.near_rounds import State
from tidewheel.data.stages.partition import Part
from tidewheel.versions import Version

STAGE = "dedup_near"
REASON = "near_duplicate"
VERSION = Version("dedup_near", uses=(near_rounds.VERSION, drops.VERSION))
COUNTED_CLUSTERS = 1 << 20  # about as many survivors are counted at most, chosen by the hash of their id
_SIZES = [2, 3, 4, 5, 7, 11, 21, 51, 101, 1001, 1 << 62]


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the near-duplicates among the documents that are left."""
    step = job.config.step(STAGE)
    edges, tasks = near_edges.run(job, runner, parts)
    compared = near_exact.run(job, runner, tasks, edges.units)
    verified = compared.units or edges.units
    states = [State(unit.unit.number, unit.files["edges"], None, unit.summary["edges"]) for unit in verified]
    rounds, states = near_rounds.run(job, runner, states)
    done = _decide(job, runner, parts, states, verified)
    stages = [done, edges, compared, *rounds]
    if step.write_index:
        stages.append(near_index.write(job, runner, tasks, done.units))
    return Finished([unit for stage in stages for unit in stage.units], sum(stage.reused for stage in stages),
                    sum(stage.seconds for stage in stages)), after(parts, done.units)


def _decide(job: Job, runner: Runner, parts: list[Part], states: list[State], verified: list[Published]) -> Finished:
    contents = [part for state in states for part in state.content()]
    every = max(sum(part.count for part in parts) // COUNTED_CLUSTERS, 1)
    todo = part_tasks(job, STAGE, parts, settings=[contents, every, [index.hash for index in job.indexes]],
                      version=VERSION, together=True,
                      more={"every": every, "against": [index.uri for index in job.indexes]})
    known = {state.number: state for state in states}
    todo = [Task(task.output, task.unit, {**task.inputs, "dropped_so_far": known[task.unit.number].dropped})
            for task in todo]
    total = sum(unit.summary["edges"] for unit in verified)
    return runner.complete(STAGE, todo, functools.partial(_publish_all, job, near_rounds.open_task(job.output, states)),
                           note=f"{total} verified edges")


def _publish_all(job: Job, source: list[Task], missing: list[Task]) -> Iterator[Published]:
    wanted = {task.unit.number: task for task in missing}
    home = Hop("partition", functools.partial(_publish_wanted, dict(wanted)))
    read = functools.partial(read_last, job.partitions)
    for unit in shuffle_units(source, read, DROP_SCHEMA, [home], job.partitions) if source else ():
        del wanted[unit.unit.number]
        yield unit
    yield from map_units(list(wanted.values()), publish_part) if wanted else ()


def read_last(partitions: int, task: Task) -> Iterator[pa.Table]:
    """What the edges decide that are still open; `DROP_SCHEMA`."""
    yield with_partition(near_rounds.last(task), partitions)


def _publish_wanted(wanted: Mapping[int, Task], number: int, table: pa.Table) -> Published | None:
    return publish_part(wanted[number], table) if number in wanted else None


def publish_part(task: Task, decided: pa.Table | None = None) -> Published:
    """The unit of one partition: what rounds dropped there, and what was `decided` (`DROP_SCHEMA`) from open edges."""
    stamp = task.inputs["dropped_so_far"]
    gone = read_table(task.store, stamp) if stamp else dedup.DROPPED_SCHEMA.empty_table()
    if decided is not None:
        gone = gone.filter(pc.invert(pc.is_in(gone["id"], value_set=decided["id"].combine_chunks())))
        gone = pa.concat_tables([gone, decided.select(dedup.DROPPED_SCHEMA.names)])
    counted = pa.array(verdicts.hash_ids(gone["survivor"]) % np.uint64(task.inputs["every"]) == 0)
    clusters = gone.filter(counted).group_by("survivor").aggregate([([], "count_all")]).sort_by("survivor")
    writer = task.writer()
    writer.table("clusters", clusters)
    return publish_duplicates(task, REASON, gone.sort_by("id"), writer)


def report(job: Job, units: list[Published]) -> dict[str, Any]:
    """What the report shows of near-deduplication, from all units of `run`; JSON values.

    `cluster_sizes`: clusters (a survivor and what was dropped for it) by number of documents, of one survivor in
    `clusters_counted_one_in`. `sample`: recall of the bands by bin of exact similarity, measured with one band less
    (it drew the pairs) and as that many bands would have it, beside the S-curve; and how well candidates were judged.
    """
    step: DedupNearStep = job.config.step(STAGE)
    edges = [unit for unit in units if unit.unit.stage == near_edges.STAGE]
    final = [unit for unit in units if unit.unit.stage == STAGE]
    exact = [unit for unit in units if unit.unit.stage == near_exact.STAGE]
    clusters = pa.concat_tables([read_table(job.store, unit.files["clusters"]) for unit in final])
    sizes = clusters.group_by("survivor").aggregate([("count_all", "sum")])["count_all_sum"].to_numpy() + 1
    counts, _ = np.histogram(sizes, _SIZES)
    documents = sum(unit.summary["documents_in"] for unit in final)
    return {
        **near_index.parameters(step), "documents": documents, "against": [index.uri for index in job.indexes],
        "dropped": documents - sum(unit.summary["documents"] for unit in final),
        "candidates": sum(unit.summary["candidates"] for unit in edges),
        "compared_exactly": sum(unit.summary["compared"] for unit in exact),
        "edges": sum(unit.summary["edges"] for unit in exact),
        "rounds": len({unit.unit.stage for unit in units if unit.unit.stage.startswith(near_rounds.STAGE)}),
        "estimated_jaccard": histograms.merge([unit.summary["histograms"] for unit in edges]).get("jaccard"),
        "cluster_sizes": [{"from": first, "to": last - 1 if last < _SIZES[-1] else None, "clusters": int(count)}
                          for first, last, count in zip(_SIZES, _SIZES[1:], counts, strict=False)],
        "largest_cluster": int(sizes.max()) if len(sizes) else 0,
        "clusters_counted_one_in": max(documents // COUNTED_CLUSTERS, 1),
        "sample": near_exact.report([unit.summary["sample"] for unit in exact], step),
    }
