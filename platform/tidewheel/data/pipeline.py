"""Run a data pipeline on Ray Data; a run that was killed continues when it is started again.

The stages are: ingest (a unit for each file), partition, the recipe's steps over partitions of the documents, the
tokenizer, and pack. Each stage consists of durable units (`stage`). A published, intact unit is not made again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.data.config import LAST, PipelineConfig
from tidewheel.data.pipeline_summary import PipelineSummary
from tidewheel.data.stage import Published, counts, read_file
from tidewheel.data.stages import (
    by_source,
    decontaminate,
    dedup_exact,
    dedup_lines,
    dedup_near,
    dedup_url,
    empty,
    ingest,
    input_versions,
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
from tidewheel.data.stages.execute import Finished, Runner
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.ray_data import placed
from tidewheel.data.stages.resolve import resolve
from tidewheel.data.stages.summary import Ledger
from tidewheel.errors import InputError, OwnershipError, StorageError
from tidewheel.lease import Held, holding
from tidewheel.shards.manifest import GROWING
from tidewheel.shards.manifest import KEY as MANIFEST
from tidewheel.storage import TEMPORARY_PREFIX, Stamp, is_remote

logger = logging.getLogger(__name__)

LEASES = "leases"
OnProgress = Callable[[str, int, int, str], None]
ABANDONED_SECONDS = 86_400.0
"""Age from which a multipart upload belongs to a killed run: no unit takes this long to upload."""
WRITTEN_FOLDERS = ("stages", "verdicts", "annotations", "quarantine", write.FOLDER, *pack.SETS)
"""Folders below the output that a killed run may leave temporary files in."""


def run(config: PipelineConfig, *, input: str, output: str, on_progress: OnProgress | None = None,
        fail_above: float | None = None, verify: bool = False, may_replace: bool = False) -> PipelineSummary:
    """Run a pipeline in the Ray cluster that this process is connected to.

    A run that was killed at any point continues when it is started again.

    Args:
        config: the recipe.
        input: URI that the recipe's relative paths are resolved against.
        output: URI to write to. A lease in it admits one pipeline at a time.
        on_progress: called with (stage, finished units, all units, note).
        fail_above: overrides `fail_above` of the decontamination step.
        verify: read all published files, and write damaged ones again.
        may_replace: replace what another recipe or input made in the output.

    Raises:
        ConfigError: the run would replace results, and `may_replace` is False.
        OwnershipError: another pipeline is writing to this output.
        StorageError: the input or output cannot be used.
        InputError: no file matches, too many records are bad, too many documents are contaminated, or none is left.
        ClusterError: no node matches `placement`.
    """
    job = resolve(config, input=input, output=output)
    job.store.check()
    with holding(job.store.child(LEASES), "pipeline", "another pipeline is writing to this output",
                 say=lambda line: print(line, file=sys.stderr, flush=True)) as held:
        if not may_replace:
            replace.refuse(job)
        return _run(job, held, Runner(job.output, on_progress, verify), fail_above)


def _run(job: Job, held: Held, runner: Runner, fail_above: float | None) -> PipelineSummary:
    _remove_partial_files(job)
    input_versions.record(job.store, job.commits)
    replace.begin(job)
    ledger = Ledger()
    with placed(job.config.placement.selector):
        done = complete_stages(job, runner, ledger, fail_above)
    if held.lost:  # both pipelines write the same units, but only the owner may write the manifests
        raise OwnershipError("another pipeline took over this output because this one did not renew its lease",
                             where=job.output, fix="wait for the other one; it reuses the units that are finished")
    ledger.publish_verdicts(job)
    if ledger.near_index:
        near_index.commit(job, ledger.near_index)
    runner.tidy("annotations", ledger.annotating)
    file = read_file(job.store, done.tokenizer) if done.tokenizer else b""
    product = None
    manifests = None
    if job.config.product is not None:
        product = write.commit(job, done.written, ledger.stages, done.evaluation_sets, file)
    if job.config.step("pack"):
        manifests = pack.commit(job, done.packed, file, done.evaluation_sets)
    _withdraw(job)
    value = summary.write(job, ledger, done.packed, manifests, origin.write(job), product, done.written)
    replace.finish(job.store, runner.completed)
    return PipelineSummary(value, job.output)


def _withdraw(job: Job) -> None:
    """Delete manifests that an earlier recipe published and this one does not write: their results are outdated."""
    for folder in pack.SETS if not job.config.step("pack") else ():
        job.store.delete(f"{folder}/{MANIFEST}")
        job.store.delete(f"{folder}/{GROWING}")
    if job.config.product is None:
        job.store.delete(f"{write.FOLDER}/{MANIFEST}")


@dataclass(frozen=True)
class Completed:
    """Results of the last stages.

    Args:
        written: units of the `write` stage.
        packed: units of the training and validation sets.
        tokenizer: file of the tokenizer; None if the recipe does not tokenize.
        evaluation_sets: fingerprints of the evaluation sets.
    """

    written: list[Published]
    packed: list[Published]
    tokenizer: Stamp | None
    evaluation_sets: Sequence[dict[str, Any]]


def complete_stages(job: Job, runner: Runner, ledger: Ledger, fail_above: float | None = None) -> Completed:
    """Complete every stage in order.

    Args:
        job: what the stages work on.
        runner: completes a stage's units.
        ledger: collects the counts of all stages.
        fail_above: overrides `fail_above` of the decontamination step.

    Raises:
        InputError: too many records are bad, too many documents are contaminated, or none is left.
    """
    logger.info("pipeline %s: %s to %s", job.config.name, job.input, job.output)
    ingested = ingest.run(job, runner)
    _record_reading(job.config, ledger, ingested)
    done, parts = partition.run(job, runner, ingested.units)
    ledger.parts(partition.STAGE, done)
    runner.tidy("quarantine", [*ingested.units, *done.units])
    evaluation_sets: Sequence[dict[str, Any]] = ()
    for stage, step in steps_by_stage(job.config):
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
            done, parts, contamination = decontaminate.run(job, runner, parts, fail_above)
            ledger.more["contamination"] = contamination
            evaluation_sets = contamination["sets"]
        ledger.parts(stage, done)
        logger.info("stage %s completed %d units", stage, len(done.units))
    left = sum(part.count for part in parts)
    if not left:
        raise empty.nothing_left(ledger.stages, ledger.quarantine, job)
    file = None
    written: list[Published] = []
    if job.config.step("tokenize"):
        finished = tokenizer.run(job, runner, parts)
        ledger.stage(tokenizer.STAGE, finished, documents_in=left, documents_out=left)
        file = finished.units[0].files["tokenizer"]
    if job.config.product is not None:
        product = write.run(job, runner, parts, file)
        written = product.units
        ledger.stage(write.STAGE, product, documents_in=left, documents_out=left)
    if file is None or not job.config.step("pack"):
        return Completed(written, [], file, evaluation_sets)
    packed = _pack(job, runner, ledger, parts, file, evaluation_sets)
    return Completed(written, packed, file, evaluation_sets)


def _pack(job: Job, runner: Runner, ledger: Ledger, parts: list[partition.Part], tokenizer_file: Stamp,
          evaluation_sets: Sequence[dict[str, Any]]) -> list[Published]:
    """Complete the pack stage and check its rows."""
    packed = pack.run(job, runner, parts, tokenizer_file, evaluation_sets)
    documents = sum(unit.summary[name]["documents"] for unit in packed.units for name in pack.SETS)
    ledger.stage(pack.STAGE, packed, documents_in=sum(unit.summary["documents_in"] for unit in packed.units),
                 documents_out=documents, dropped=counts(packed.units, "dropped"))
    if job.config.read.kind != "documents":
        ledger.judged(pack.STAGE, packed.units)
        if not documents:
            reason, samples = min(ledger.samples[pack.STAGE].items())
            raise InputError(f"no conversation could be tokenized ({reason}: {samples[0].get('detail', '')})",
                             where=job.input, fix="correct the chat template, or raise pack.sequence_length")
    if (error := empty.no_training_row(packed.units, job)) is not None:
        raise error
    if "contamination" in ledger.more:
        ledger.more["contamination"]["packed"] = decontaminate.check_packed(job, runner, packed.units, tokenizer_file)
    return packed.units


def stages(config: PipelineConfig) -> list[str]:
    """Return the names of the stages in order, as `on_progress` gets them; parts of a stage have names of their own."""
    last = ((tokenizer.STAGE, config.step("tokenize")), (write.STAGE, config.product),
            (pack.STAGE, config.step("pack")))
    return [ingest.STAGE, partition.STAGE, *(name for name, _ in steps_by_stage(config)),
            *(name for name, step in last if step)]


def check(config: PipelineConfig, *, input: str, output: str, may_replace: bool = False) -> None:
    """Raise the errors that `run` would raise before its first stage; it takes a moment and no Ray.

    Args:
        config: the recipe.
        input: URI that the recipe's relative paths are resolved against.
        output: URI to write to.
        may_replace: as in `run`.

    Raises:
        ConfigError: a run would replace results, and `may_replace` is False.
        StorageError: the input or output cannot be used.
        InputError: no file matches, or a file that the recipe names is missing or invalid.
    """
    job = resolve(config, input=input, output=output)
    job.store.check()
    if not may_replace:
        replace.refuse(job)


def steps_by_stage(config: PipelineConfig) -> list[tuple[str, Any]]:
    """Return (stage name, step) of the steps between reading and the last steps; leading filters belong to reading."""
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


def _record_reading(config: PipelineConfig, ledger: Ledger, ingested: Finished) -> None:
    """Record reading and the leading filters, which are one pass, as two stages."""
    units = ingested.units
    records = sum(unit.summary["records"] for unit in units)
    ledger.skipped.update(counts(units, "skipped"))
    quarantined = counts(units, "quarantined")
    dropped = counts(units, "dropped")
    valid = records - sum(quarantined.values())
    ledger.stage(ingest.STAGE, ingested, documents_in=records, documents_out=valid, quarantined=quarantined,
                 left=by_source.merge(unit.summary["read"] for unit in units))
    if ingest.leading_filters(config):
        fused = Finished(units, ingested.reused, 0.0)
        ledger.stage(ingest.FILTER, fused, documents_in=valid, dropped=dropped, judged=units,
                     left=by_source.merge(unit.summary["left"] for unit in units),
                     documents_out=sum(unit.summary["documents"] for unit in units))
        ledger.judged(ingest.FILTER, units)


def _remove_partial_files(job: Job) -> None:
    """Remove files that a killed run left half-written; on an object store, old multipart uploads."""
    if is_remote(job.output):
        with contextlib.suppress(StorageError):  # listing uploads may be forbidden, which must not stop a pipeline
            job.store.abort_uploads(before=time.time() - ABANDONED_SECONDS)
        return
    for folder in WRITTEN_FOLDERS:
        for path in Path(job.output, folder).rglob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
