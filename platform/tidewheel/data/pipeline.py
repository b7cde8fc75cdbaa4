"""The data pipeline: `plan` says what would be done, `run` does it on Ray Data and can be run again at any time.

Stages, each of durable units (`stage`): ingest (one unit a file), partition, then the recipe's steps over
partitions of the documents' ids, the tokenizer, and pack. A unit that is published and intact is not done again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.data.config import LAST, FilterStep, PipelineConfig
from tidewheel.data.stage import Published, counts, lookup, read_file
from tidewheel.data.stages import (
    by_source,
    decontaminate,
    dedup_exact,
    dedup_lines,
    dedup_near,
    dedup_url,
    empty,
    hub_commits,
    ingest,
    near_index,
    origin,
    pack,
    partition,
    replace,
    row_local,
    summary,
    tokenizer,
    write,
)
from tidewheel.data.stages.execute import Finished, Runner, Task
from tidewheel.data.stages.formats import FormatLine, by_format
from tidewheel.data.stages.job import Job, resolve
from tidewheel.data.stages.ray_data import placed
from tidewheel.data.stages.summary import Ledger
from tidewheel.errors import InputError, OwnershipError, StorageError
from tidewheel.lease import Held, holding
from tidewheel.parts import is_own, name_of
from tidewheel.shards.manifest import GROWING
from tidewheel.shards.manifest import KEY as MANIFEST
from tidewheel.storage import TEMPORARY_PREFIX, Stamp, is_remote, store

logger = logging.getLogger(__name__)

LEASES = "leases"
OnProgress = Callable[[str, int, int, str], None]
ABANDONED_SECONDS = 86_400.0
"""No unit takes as long to upload: an upload in parts that began earlier is a killed run's."""


@dataclass(frozen=True)
class PipelineSummary:
    """What a pipeline did; `value` is what `summary.json` holds."""

    value: dict[str, Any]
    output: str

    @property
    def recipe_hash(self) -> str:
        """Hash of the resolved recipe."""
        return self.value["recipe_hash"]

    @property
    def documents(self) -> int:
        """Documents in the training set; without one, in the product (`write`)."""
        return self.value["documents"]

    @property
    def tokens(self) -> int:
        """Tokens in the training set."""
        return self.value["tokens"]

    def stage(self, name: str) -> dict[str, Any]:
        """The line of one stage; KeyError when there is none."""
        return {entry["name"]: entry for entry in self.value["stages"]}[name]

    @property
    def skipped(self) -> dict[str, int]:
        """Files of source trees that are left out, by reason."""
        return dict(self.value.get("skipped", {}))

    def sets(self) -> list[dict[str, str]]:
        """For a table: a line for each set; none where nothing is packed."""
        if "rows" not in self.value:
            return []
        return [{"set": name, "documents": f"{values['documents']:,}", "tokens": f"{values['tokens']:,}",
                 "rows": f"{values['rows']:,}", "filled": f"{values['utilisation']:.1%}" if values["rows"] else "-"}
                for name, values in (("training", self.value), ("validation", self.value["validation"]))]

    def rows(self) -> list[dict[str, str]]:
        """For a table: a line for each stage."""
        return [{
            "stage": entry["name"], "in": f"{entry['documents_in']:,}", "out": f"{entry['documents_out']:,}",
            "dropped": f"{sum(entry['dropped'].values()):,}", "edited": f"{entry['edited']:,}",
            "quarantined": f"{entry['quarantined']:,}",
            "units": f"{entry['units']}", "reused": f"{entry['units_reused']}", "seconds": f"{entry['seconds']:.1f}",
        } for entry in self.value["stages"]]

    def filter_speeds(self) -> list[dict[str, str]]:
        """For a table: a line for each filter that was applied, the slowest first; none in a recipe without filters of
        the user's own, and where every unit was there already."""
        costs = [(stage["name"], cost) for stage in self.value["stages"] for cost in stage.get("filters", ())]
        if not any(is_own(cost["name"]) for _, cost in costs):
            return []
        rates = [(cost["documents"] / max(cost["seconds"], 1e-9), stage, cost) for stage, cost in costs]
        return [{"filter": cost["name"], "stage": stage, "documents": f"{cost['documents']:,}",
                 "documents a second on a core": f"{rate:,.0f}"}
                for rate, stage, cost in sorted(rates, key=lambda row: row[0])]

    def most_frequent_reasons(self) -> list[str]:
        """Return a line for each stage that drops documents for several reasons: the three most frequent ones."""
        lines = []
        for entry in self.value["stages"]:
            counts = sorted(entry["dropped"].items(), key=lambda item: (-item[1], item[0]))
            if len(counts) < 2:
                continue
            told = ", ".join(f"{reason} {count:,}" for reason, count in counts[:3])
            rest = f" and {len(counts) - 3} other reasons" if len(counts) > 3 else ""
            lines.append(f"{entry['name']} dropped most for {told}{rest}")
        return lines


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan: its units, and how many are published; None where earlier stages decide that."""

    name: str
    units: int
    published: int | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What `run` would do."""

    stages: tuple[PlannedStage, ...]
    recipe_hash: str
    files: int
    input_bytes: int
    partitions: int
    formats: tuple[FormatLine, ...] = ()
    replaces: str = ""
    """What another recipe or input has made in the output, for people; "" where nothing is replaced."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Files of source trees that their names or lengths leave out, by reason."""

    def rows(self) -> list[dict[str, str]]:
        """For a table: a line for each stage."""
        return [{"stage": stage.name, "units": str(stage.units),
                 "published": "after the stage before" if stage.published is None else str(stage.published),
                 "what": stage.note} for stage in self.stages]


def run(config: PipelineConfig, *, input: str, output: str, on_progress: OnProgress | None = None,
        fail_above: float | None = None, verify: bool = False, may_replace: bool = False) -> PipelineSummary:
    """Run a pipeline on the Ray that is initialised in this process. Killed anywhere and run again, it goes on.

    Args:
        config: the recipe.
        input: URI that the recipe's relative paths are below.
        output: URI to write to; one pipeline at a time, as a lease in it says.
        on_progress: called with (stage, units done, units in all, note).
        fail_above: instead of the decontamination step's own.
        verify: read every file that is published already, and write anew what is damaged.
        may_replace: what another recipe has made in the output is replaced.

    Raises:
        ConfigError: something would be replaced, and `may_replace` is not given.
        OwnershipError: another pipeline is writing to this output.
        StorageError: input or output cannot be used.
        InputError: no file matches, too many records are bad, too many documents are contaminated, or none is left.
        ClusterError: no node is one that `placement` asks for.
    """
    job = resolve(config, input=input, output=output)
    job.store.check()
    with holding(job.store.child(LEASES), "pipeline", "another pipeline is writing to this output",
                 say=lambda line: print(line, file=sys.stderr, flush=True)) as held:
        if not may_replace:
            replace.refuse(job)
        return _run(job, held, Runner(job.output, on_progress, verify), fail_above)


def _run(job: Job, held: Held, runner: Runner, fail_above: float | None) -> PipelineSummary:
    _sweep(job)
    hub_commits.note(job.store, job.commits)
    replace.begin(job)
    ledger = Ledger()
    with placed(job.config.placement.selector):
        done = _stages(job, runner, ledger, fail_above)
    if held.lost:  # units are the same whoever writes them; the manifests are the other one's now
        raise OwnershipError("another pipeline has begun to write to this output, as this one showed no sign of life",
                             where=job.output, mend="wait for the other one; what both have done is not done again")
    ledger.publish_verdicts(job)
    if ledger.near_index:
        near_index.commit(job, ledger.near_index)
    runner.tidy("annotations", ledger.annotating)
    file = read_file(job.store, done.tokenizer) if done.tokenizer else b""
    product = manifests = None
    if job.config.product is not None:
        product = write.commit(job, done.written, ledger.stages, done.evaluation_sets, file)
    if job.config.step("pack"):
        manifests = pack.commit(job, done.packed, file, done.evaluation_sets)
    _withdraw(job)
    value = summary.write(job, ledger, done.packed, manifests, origin.write(job), product, done.written)
    replace.finish(job.store, runner.completed)
    return PipelineSummary(value, job.output)


def _withdraw(job: Job) -> None:
    """Take back what an earlier recipe has published here and this one does not make: it would pass for its work."""
    for folder in pack.SETS if not job.config.step("pack") else ():
        job.store.delete(f"{folder}/{MANIFEST}")
        job.store.delete(f"{folder}/{GROWING}")
    if job.config.product is None:
        job.store.delete(f"{write.FOLDER}/{MANIFEST}")


@dataclass(frozen=True)
class _Completed:
    """What the last stages made: units of the product and the sets, the tokenizer's file, and the fingerprints of the
    evaluation sets."""

    written: list[Published]
    packed: list[Published]
    tokenizer: Stamp | None
    evaluation_sets: Sequence[dict[str, Any]]


def _stages(job: Job, runner: Runner, ledger: Ledger, fail_above: float | None = None) -> _Completed:
    """Complete every stage."""
    logger.info("pipeline %s: %s to %s", job.config.name, job.input, job.output)
    ingested = ingest.run(job, runner)
    _read_lines(job.config, ledger, ingested)
    done, parts = partition.run(job, runner, ingested.units)
    ledger.parts(partition.STAGE, done)
    runner.tidy("quarantine", [*ingested.units, *done.units])
    evaluation_sets: Sequence[dict[str, Any]] = ()
    for stage, step in _middle(job.config):
        if step.kind == "filter":
            done, parts = row_local.run_filter(job, runner, parts, stage, step.settings)
        elif step.kind == "dedup_url":
            done, parts = dedup_url.run(job, runner, parts)
        elif step.kind == "dedup_exact":
            done, parts = dedup_exact.run(job, runner, parts)
        elif step.kind == "dedup_near":
            done, parts = dedup_near.run(job, runner, parts)
            ledger.more["near_dedup"] = dedup_near.report(job, done.units)
            ledger.near_index = [unit for unit in done.units if unit.unit.stage == near_index.STAGE]
        elif step.kind == "dedup_lines":
            done, parts = dedup_lines.run(job, runner, parts)
        else:
            done, parts, found = decontaminate.run(job, runner, parts, fail_above)
            ledger.more["contamination"], evaluation_sets = found, found["sets"]
        ledger.parts(stage, done)
        logger.info("stage %s has ended with %d units", stage, len(done.units))
    left = sum(part.count for part in parts)
    if not left:
        raise empty.nothing_left(ledger.stages, ledger.quarantine, job)
    file, written = None, list[Published]()
    if job.config.step("tokenize"):
        made = tokenizer.run(job, runner, parts)
        ledger.stage(tokenizer.STAGE, made, documents_in=left, documents_out=left)
        file = made.units[0].files["tokenizer"]
    if job.config.product is not None:
        product = write.run(job, runner, parts, file)
        written = product.units
        ledger.stage(write.STAGE, product, documents_in=left, documents_out=left)
    if file is None or not job.config.step("pack"):
        return _Completed(written, [], file, evaluation_sets)
    packed = pack.run(job, runner, parts, file, evaluation_sets)
    made_of = sum(unit.summary[name]["documents"] for unit in packed.units for name in pack.SETS)
    ledger.stage(pack.STAGE, packed, documents_in=sum(unit.summary["documents_in"] for unit in packed.units),
                 documents_out=made_of, dropped=counts(packed.units, "dropped"))
    if job.config.read.kind != "documents":
        ledger.judged(pack.STAGE, packed.units)
        if not made_of:
            told = next(iter(sorted(ledger.samples[pack.STAGE].items())))
            raise InputError(f"no conversation could be tokenized ({told[0]}: {told[1][0].get('detail', '')})",
                             where=job.input, mend="correct the chat template, or raise pack.sequence_length")
    if (error := empty.no_training_row(packed.units, job)) is not None:
        raise error
    if "contamination" in ledger.more:
        ledger.more["contamination"]["packed"] = decontaminate.check_packed(job, runner, packed.units, file)
    return _Completed(written, packed.units, file, evaluation_sets)


def stages(config: PipelineConfig) -> list[str]:
    """Names of the stages in order, as `on_progress` is told them; parts of a stage have names of their own."""
    last = ((tokenizer.STAGE, config.step("tokenize")), (write.STAGE, config.product),
            (pack.STAGE, config.step("pack")))
    return [ingest.STAGE, partition.STAGE, *(name for name, _ in _middle(config)),
            *(name for name, wanted in last if wanted)]


def check(config: PipelineConfig, *, input: str, output: str, may_replace: bool = False) -> None:
    """Raise what `run` would raise before it starts, in a moment and without Ray: no such input, bucket or access."""
    job = resolve(config, input=input, output=output)
    job.store.check()
    if not may_replace:
        replace.refuse(job)


def plan(config: PipelineConfig, *, input: str, output: str) -> Plan:
    """What `run` would do, without Ray and without writing anything. Raises what `run` raises before it starts."""
    job = resolve(config, input=input, output=output)
    found = _Survey(job.output)
    with contextlib.suppress(_Unfinished):
        _stages(job, found, Ledger())
    size = sum(file.bytes for file in job.files)
    rules = ", ".join(_filters(step) for step in ingest.leading_filters(config))
    files = sum(len(file.members) or 1 for file in job.files)
    what = f"read {files} files, {size / 1e6:.1f} MB" + (f"; filter: {rules}" if rules else "")
    lines = [
        (ingest.STAGE, len(ingest.tasks(job)), what),
        (partition.STAGE, job.partitions, "documents by the hash of their id"),
        *((stage, job.partitions, _note(step)) for stage, step in _middle(config)),
        *_last(job),
    ]
    return Plan(tuple(PlannedStage(name, units, found.published.get(name), note) for name, units, note in lines),
                job.config.recipe_hash(), files, size, job.partitions, by_format(job.files, config.read),
                replace.would_replace(job), job.skipped)


def _last(job: Job) -> list[tuple[str, int, str]]:
    """(stage, units, note) of the tokenizer and what writes."""
    lines = []
    tokenize, rows, product = job.config.step("tokenize"), job.config.step("pack"), job.config.product
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
    """A stage has units to do, so what comes after it is not known yet."""


class _Survey(Runner):
    """Goes through the stages as far as they are published, and only looks."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.published: dict[str, int] = {}

    def complete(self, stage: str, tasks: Sequence[Task], execute: Any, note: str = "", follow: Any = None) -> Finished:
        found = lookup(store(self.output), [task.unit for task in tasks])
        self.published[stage] = len(found)
        if len(found) < len(tasks):
            raise _Unfinished
        return Finished([found[task.unit.key] for task in tasks], len(tasks), 0.0)

    def tidy(self, folder: str, units: Sequence[Published]) -> None:
        """Nothing: a survey changes nothing."""


def _note(step: Any) -> str:
    if step.filter is not None:
        return _filters(step.filter)
    given = step.settings.canonical()
    return ", ".join(f"{name} {value}" for name, value in given.items()
                     if value is not None and value is not False and value != [] and not isinstance(value, dict))


def _filters(step: FilterStep) -> str:
    return ", ".join(name_of(type(filter)) for filter in step.filters) + (" (annotate only)" if step.annotate else "")


def _middle(config: PipelineConfig) -> list[tuple[str, Any]]:
    """(stage name, step) of the steps between reading, which leading filters belong to, and the tokenizer or what
    writes."""
    steps = [step for step in config.steps if step.kind not in LAST]
    filters = 0
    while steps and steps[0].kind == "filter":
        steps.pop(0)
        filters = 1
    named = []
    for step in steps:
        filters += step.kind == "filter"
        named.append((f"filter_{filters}" if step.kind == "filter" and filters > 1 else step.kind, step))
    return named


def _read_lines(config: PipelineConfig, ledger: Ledger, ingested: Finished) -> None:
    """Reading and the leading filters are one pass, told as two stages."""
    units = ingested.units
    records = sum(unit.summary["records"] for unit in units)
    ledger.skipped.update(counts(units, "skipped"))
    quarantined, dropped = counts(units, "quarantined"), counts(units, "dropped")
    valid = records - sum(quarantined.values())
    ledger.stage(ingest.STAGE, ingested, documents_in=records, documents_out=valid, quarantined=quarantined,
                 left=by_source.merge(unit.summary["read"] for unit in units))
    if ingest.leading_filters(config):
        fused = Finished(units, ingested.reused, 0.0)
        ledger.stage(ingest.FILTER, fused, documents_in=valid, dropped=dropped, judged=units,
                     left=by_source.merge(unit.summary["left"] for unit in units),
                     documents_out=sum(unit.summary["documents"] for unit in units))
        ledger.judged(ingest.FILTER, units)


def _sweep(job: Job) -> None:
    """Remove what a killed run left half-written: files, and on an object store uploads in parts that are old."""
    if is_remote(job.output):
        with contextlib.suppress(StorageError):  # it may not be allowed to list them; that stops nobody's pipeline
            job.store.abort_uploads(before=time.time() - ABANDONED_SECONDS)
        return
    for folder in ("stages", "verdicts", "annotations", "quarantine", write.FOLDER, *pack.SETS):
        for path in Path(job.output, folder).rglob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
