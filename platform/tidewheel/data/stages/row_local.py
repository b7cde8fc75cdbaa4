"""Filter steps after the first step that compares documents: they judge documents partition by partition."""

from __future__ import annotations

import contextlib

from tidewheel.data.config import FilterStep
from tidewheel.data.stage import Published
from tidewheel.data.stages import drops, filters, keys, outcomes, rewrite
from tidewheel.data.stages.drops import after, part_tasks, publish
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.stages.rewrite import Rewriter
from tidewheel.versions import Version

VERSION = Version("filter_step", uses=(outcomes.VERSION, rewrite.VERSION, drops.VERSION))


def run_filter(job: Job, runner: Runner, parts: list[Part], stage: str, step: FilterStep
               ) -> tuple[Finished, list[Part]]:
    """Apply the filters of one step.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.
        stage: name of the stage.
        step: settings of the step.

    Returns:
        The units, and the partitions after the stage.
    """
    bound = outcomes.grouped([step], job.bound)
    identity = outcomes.grouped([step], job.identity)
    rewrites = not step.annotate and any(filter.changes() for filter in step.filters)
    version = VERSION.using(*filters.versions(step.filters))
    minhash = keys.minhash_settings(job.config)
    todo = part_tasks(job, stage, parts, settings=[identity, minhash], version=version, together=False,
                      more={"filters": bound, "rewrite": rewrites})
    done = runner.complete(stage, todo, lambda missing: map_units(missing, filter_part))
    return done, after(parts, done.units)


def filter_part(task: Task) -> Published:
    """Publish the unit of one partition; if its filters edit documents, with new documents and keys."""
    groups = outcomes.groups(task.inputs["filters"])
    results = outcomes.Outcomes()
    with contextlib.ExitStack() as closing:
        rewriter = closing.enter_context(Rewriter(task)) if task.inputs["rewrite"] else None
        for table in load_documents(task.store, task.inputs):
            passed = results.apply(groups, table)
            if rewriter is not None and len(passed.table):
                rewriter.add(passed.table, passed.changed, passed.quality)
    writer = rewriter.writer if rewriter is not None else task.writer()
    results.write_annotations(writer, task.unit.stage)
    return publish(task, results.verdicts(), results.samples_of(), results.summary(), writer, results.costs)
