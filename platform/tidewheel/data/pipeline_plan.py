"""What a pipeline would do: its stages, their units, and how many of those are published already."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.data.config import FilterStep, PipelineConfig
from tidewheel.data.pipeline import complete_stages, steps_by_stage
from tidewheel.data.stage import Published, lookup
from tidewheel.data.stages import ingest, pack, partition, replace, tokenizer, write
from tidewheel.data.stages.execute import Finished, Runner, Task
from tidewheel.data.stages.formats import FormatLine, by_format
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.resolve import resolve
from tidewheel.data.stages.summary import Ledger
from tidewheel.parts import name_of
from tidewheel.storage import store


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    Args:
        name: name of the stage.
        units: number of its units.
        published: number of units that are published already; None if that depends on unfinished earlier stages.
        note: what the stage does, in a few words.
    """

    name: str
    units: int
    published: int | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What `pipeline.run` would do.

    Args:
        stages: the stages in order.
        recipe_hash: hash of the resolved recipe.
        files: number of input files.
        input_bytes: size of the input files.
        partitions: number of partitions of the documents.
        formats: formats of the input files.
        replaces: results of another recipe or input that a run would replace, as text; "" if none.
        skipped: number of files of source trees skipped for their name or length, by reason.
    """

    stages: tuple[PlannedStage, ...]
    recipe_hash: str
    files: int
    input_bytes: int
    partitions: int
    formats: tuple[FormatLine, ...] = ()
    replaces: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)

    def rows(self) -> list[dict[str, str]]:
        """Return a table row for each stage."""
        return [{"stage": stage.name, "units": str(stage.units),
                 "published": "after the stage before" if stage.published is None else str(stage.published),
                 "what": stage.note} for stage in self.stages]


def plan(config: PipelineConfig, *, input: str, output: str) -> Plan:
    """Return what `pipeline.run` would do, without starting Ray and without writing anything.

    Args:
        config: the recipe.
        input: URI that the recipe's relative paths are resolved against.
        output: URI that the pipeline would write to.

    Raises:
        StorageError: the input or output cannot be used.
        InputError: no file matches, or a file that the recipe names is missing or invalid.
    """
    job = resolve(config, input=input, output=output)
    survey = _Survey(job.output)
    with contextlib.suppress(_Unfinished):
        complete_stages(job, survey, Ledger())
    size = sum(file.bytes for file in job.files)
    filters = ", ".join(_filter_names(step) for step in ingest.leading_filters(config))
    files = sum(len(file.members) or 1 for file in job.files)
    what = f"read {files} files, {size / 1e6:.1f} MB" + (f"; filter: {filters}" if filters else "")
    lines = [
        (ingest.STAGE, len(ingest.tasks(job)), what),
        (partition.STAGE, job.partitions, "documents by the hash of their id"),
        *((stage, job.partitions, _note(step)) for stage, step in steps_by_stage(config)),
        *_last_stages(job),
    ]
    return Plan(tuple(PlannedStage(name, units, survey.published.get(name), note) for name, units, note in lines),
                job.config.recipe_hash(), files, size, job.partitions, by_format(job.files, config.read),
                replace.would_replace(job), job.skipped)


def _last_stages(job: Job) -> list[tuple[str, int, str]]:
    """Return (stage, units, note) of the tokenizer and of the stages that write."""
    lines = []
    tokenize = job.config.step("tokenize")
    rows = job.config.step("pack")
    product = job.config.product
    if tokenize:
        lines.append((tokenizer.STAGE, 1, f"from {tokenize.file}" if tokenize.file else
                      f"train, {tokenize.train.vocabulary_size} tokens"))
    if product:
        lines.append((write.STAGE, job.partitions, f"{', '.join(product.formats)} to {write.FOLDER}/"))
    if rows:
        lines.append((pack.STAGE, job.partitions, f"rows of {rows.sequence_length} tokens, "
                                                  f"{rows.validation_fraction:g} of the documents for validation"))
    return lines


class _Unfinished(Exception):
    """A stage has units to do, so the units of later stages are not known yet."""


class _Survey(Runner):
    """Runner that looks up published units and stops at the first stage with a missing one."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.published: dict[str, int] = {}

    def complete(self, stage: str, tasks: Sequence[Task], execute: Any, note: str = "", follow: Any = None) -> Finished:
        published = lookup(store(self.output), [task.unit for task in tasks])
        self.published[stage] = len(published)
        if len(published) < len(tasks):
            raise _Unfinished
        return Finished([published[task.unit.key] for task in tasks], len(tasks), 0.0)

    def tidy(self, folder: str, units: Sequence[Published]) -> None:
        """Do nothing: a survey changes nothing."""


def _note(step: Any) -> str:
    if step.filter is not None:
        return _filter_names(step.filter)
    settings = step.settings.canonical()
    return ", ".join(f"{name} {value}" for name, value in settings.items()
                     if value is not None and value is not False and value != [] and not isinstance(value, dict))


def _filter_names(step: FilterStep) -> str:
    return ", ".join(name_of(type(filter)) for filter in step.filters) + (" (annotate only)" if step.annotate else "")
