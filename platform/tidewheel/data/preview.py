"""Apply each filter of a recipe to a few documents, in this process and without Ray or output.

Each filter judges all documents, even documents that an earlier filter drops, so that thresholds can change later.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewheel.data import quarantine
from tidewheel.data.config import PipelineConfig
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.filter import Filter
from tidewheel.data.stages import filters, ingest
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import ConfigError, InputError
from tidewheel.parts import name_of

TEXT_CHARACTERS = 1500
_MARK = 123_456.5
"""Value that marks a setting; nobody sets it as a threshold."""


@dataclass(frozen=True)
class Threshold:
    """A limit of a filter.

    Args:
        filter: name of the filter.
        key: key of the statistic in `Shown.statistics`.
        statistic: name of the statistic.
        side: "least" to drop smaller values, "most" to drop larger ones.
        limit: the limit; values equal to it are kept.
        set: name of the setting for `--set`; "" if the limit does not follow from a single number.
    """

    filter: str
    key: str
    statistic: str
    side: str
    limit: float
    set: str


@dataclass(frozen=True)
class Shown:
    """A document of a preview.

    Args:
        id: its id.
        source: its source.
        text: the beginning of its text.
        statistics: its statistics, by key.
        fixed: reasons to drop it that do not depend on a threshold.
    """

    id: str
    source: str
    text: str
    statistics: dict[str, float]
    fixed: list[str]


@dataclass(frozen=True)
class Preview:
    """Verdicts of filters on a few documents.

    Args:
        documents: the documents.
        thresholds: limits of all filters.
        quarantined: number of records that cannot be used, by reason.
    """

    documents: list[Shown]
    thresholds: list[Threshold]
    quarantined: dict[str, int]


def look(config: PipelineConfig, *, input: str, limit: int) -> Preview:
    """Judge the first documents of each file.

    Args:
        config: the recipe.
        input: URI that relative paths are resolved against.
        limit: total number of documents.

    Raises:
        ConfigError: the recipe has no filter.
        StorageError: the input cannot be used.
        InputError: no file matches, or no document can be read.
    """
    steps = [(number, step.filter) for number, step in enumerate(config.steps) if step.filter is not None]
    if not steps:
        raise ConfigError("the recipe has no filter to look at", where=config.name, fix="add a step `filter`")
    read = config.read.model_copy(update={"limit": limit})
    nowhere = Path(tempfile.gettempdir(), "tidewheel-preview-writes-nothing")
    job = resolve(config.model_copy(update={"read": read}), input=input, output=str(nowhere))
    table, bad = _documents(job)
    if not len(table):
        reasons = ", ".join(f"{reason} {count}" for reason, count in bad.items())
        raise InputError(f"no document can be read ({reasons or 'the files are empty'})", where=job.input,
                         fix="`tidewheel data run --dry-run` shows the first record of each format")
    texts = [text[:TEXT_CHARACTERS] for text in table["text"].to_pylist()]
    statistics: list[dict[str, float]] = [{} for _ in texts]
    fixed: list[list[str]] = [[] for _ in texts]
    thresholds: list[Threshold] = []
    for number, step in steps:
        for configured in step.filters:
            kind = name_of(type(configured))
            filter = filters.received(*job.bound(configured))
            judged = filters.judge([filter], table)
            own = _thresholds(f"steps.{number}.filter.{kind}", kind, filter)
            thresholds += own
            failing = np.zeros(len(table), bool)
            for name, values in judged.statistics.items():
                for row, value in enumerate(values.tolist()):
                    statistics[row][f"{number}.{kind}.{name}"] = round(value, 6)
            for threshold in own:
                values = judged.statistics[threshold.statistic].round(6)
                failing |= values < threshold.limit if threshold.side == "least" else values > threshold.limit
            for row in np.flatnonzero((judged.reasons != "") & ~failing).tolist():
                fixed[row].append(str(judged.reasons[row]))
            if not step.annotate:
                table = _edited(table, judged)
    shown = [Shown(*row) for row in zip(table["id"].to_pylist(), table["source"].to_pylist(), texts, statistics, fixed,
                                        strict=True)]
    return Preview(shown, thresholds, bad)


def _documents(job: Job) -> tuple[pa.Table, dict[str, int]]:
    """Return (documents, number of unusable records by reason)."""
    records: list[ingest.Record] = []
    bad: Counter[str] = Counter()
    for task in ingest.tasks(job):
        tally = ingest.Tally()
        try:
            for batch in ingest.batches(task, job.config.read, tally):
                records += batch
        except ingest.UnreadableFile:
            bad["unreadable_file"] += 1
        bad.update(quarantine.count(tally.bad))
    columns = [[getattr(record, name) for record in records] for name in DOCUMENT_SCHEMA.names]
    return pa.table(columns, schema=DOCUMENT_SCHEMA), dict(sorted(bad.items()))


def _thresholds(prefix: str, kind: str, settings: Filter) -> list[Threshold]:
    thresholds = []
    number = prefix.split(".")[1]
    names = _settings_of_limits(settings)
    for statistic, limits in settings.limits().items():
        for side, limit in zip(("least", "most"), limits, strict=True):
            if limit is not None:
                name = names.get((statistic, side), "")
                thresholds.append(Threshold(kind, f"{number}.{kind}.{statistic}", statistic, side, float(limit),
                                            f"{prefix}.{name}" if name else ""))
    return thresholds


def _settings_of_limits(settings: Filter) -> dict[tuple[str, str], str]:
    """Return the name of the setting that decides the limit of each (statistic, side).

    It is found by changing each setting to `_MARK` and looking for that value in the limits.
    """
    names = {}
    for name in type(settings).model_fields:
        if isinstance(getattr(settings, name), int | float) and not isinstance(getattr(settings, name), bool):
            marked = settings.model_copy(update={name: _MARK})
            for statistic, limits in marked.limits().items():
                for side, limit in zip(("least", "most"), limits, strict=True):
                    if limit == _MARK:
                        names[statistic, side] = name
    return names


def _edited(table: pa.Table, judged: filters.Judged) -> pa.Table:
    """Return the documents as edited by the filter, including the dropped ones."""
    table = table.set_column(1, table.schema.field("text"), pa.chunked_array([judged.texts]))
    if judged.metas is not None:
        table = table.set_column(3, table.schema.field("meta"), pa.chunked_array([judged.metas]))
    return table
