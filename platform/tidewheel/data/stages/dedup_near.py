"""Near-deduplication: find similar pairs (`near_edges`), verify them (`near_exact`) and decide them (`near_rounds`).

`dedup.cluster` defines the rule. The verdict on a dropped document names the document it resembles, the score, and the
index of that document if it belongs to an earlier dump.
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
COUNTED_CLUSTERS = 1 << 20
"""About the maximum number of survivors whose clusters are counted, chosen by the hash of their id."""
_SIZES = [2, 3, 4, 5, 7, 11, 21, 51, 101, 1001, 1 << 62]


def run(job: Job, runner: Runner, parts: list[Part]) -> tuple[Finished, list[Part]]:
    """Find the near-duplicates among the remaining documents.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.

    Returns:
        The units of all stages of near-deduplication, and the partitions without the duplicates.
    """
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
    pending = {task.unit.number: task for task in missing}
    home = Hop("partition", functools.partial(_publish_pending, dict(pending)))
    read = functools.partial(read_last, job.partitions)
    for unit in shuffle_units(source, read, DROP_SCHEMA, [home], job.partitions) if source else ():
        del pending[unit.unit.number]
        yield unit
    yield from map_units(list(pending.values()), publish_part) if pending else ()


def read_last(partitions: int, task: Task) -> Iterator[pa.Table]:
    """Yield the documents that the remaining open edges drop; `DROP_SCHEMA`."""
    yield with_partition(near_rounds.last(task), partitions)


def _publish_pending(pending: Mapping[int, Task], partition: int, table: pa.Table) -> Published | None:
    return publish_part(pending[partition], table) if partition in pending else None


def publish_part(task: Task, decided: pa.Table | None = None) -> Published:
    """Publish the unit of one partition.

    Args:
        task: the partition, with the documents that rounds dropped.
        decided: documents that the remaining open edges drop (`DROP_SCHEMA`).
    """
    stamp = task.inputs["dropped_so_far"]
    earlier_drops = read_table(task.store, stamp) if stamp else dedup.DROPPED_SCHEMA.empty_table()
    if decided is not None:
        redecided = pc.is_in(earlier_drops["id"], value_set=decided["id"].combine_chunks())
        earlier_drops = earlier_drops.filter(pc.invert(redecided))
        earlier_drops = pa.concat_tables([earlier_drops, decided.select(dedup.DROPPED_SCHEMA.names)])
    counted = pa.array(verdicts.hash_ids(earlier_drops["survivor"]) % np.uint64(task.inputs["every"]) == 0)
    clusters = earlier_drops.filter(counted).group_by("survivor").aggregate([([], "count_all")]).sort_by("survivor")
    writer = task.writer()
    writer.table("clusters", clusters)
    return publish_duplicates(task, REASON, earlier_drops.sort_by("id"), writer)


def report(job: Job, units: list[Published]) -> dict[str, Any]:
    """Return the report's section on near-deduplication as JSON values, from all units of `run`.

    `cluster_sizes` counts clusters (a survivor and the documents dropped for it) by size, for one survivor in
    `clusters_counted_one_in`. `sample` has the recall of the bands by bin of exact similarity, beside the S-curve, and
    the precision of the verification. Recall is measured without the last band, which drew the sampled pairs, and
    then extrapolated to all bands.
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
