"""What each filter of a recipe would do to a few documents, in this process and without Ray; nothing is written.

Filters are judged one by one over all documents, also those that an earlier one drops, so that thresholds can be moved.
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
_MARK = 123_456.5  # no threshold anybody sets


@dataclass(frozen=True)
class Threshold:
    """One limit of one filter.

    Args:
        filter: its name.
        key: the statistic's, in `Shown.statistics`.
        statistic: its name.
        side: "least" or "most": whether smaller or larger values are dropped.
        limit: the value, which is kept itself.
        set: the setting as `--set` names it; "" where it is no single number.
    """

    filter: str
    key: str
    statistic: str
    side: str
    limit: float
    set: str


@dataclass(frozen=True)
class Shown:
    """One document: how its text begins, its statistics by key, and reasons that no threshold gives."""

    id: str
    source: str
    text: str
    statistics: dict[str, float]
    fixed: list[str]


@dataclass(frozen=True)
class Preview:
    """What was looked at; `quarantined` counts records that cannot be used, by reason."""

    documents: list[Shown]
    thresholds: list[Threshold]
    quarantined: dict[str, int]


def look(config: PipelineConfig, *, input: str, limit: int) -> Preview:
    """Judge the first documents of each file, `limit` in all.

    Raises:
        ConfigError: the recipe has no filter.
        StorageError, InputError: as a run raises before it starts; no document can be read.
    """
    steps = [(number, step.filter) for number, step in enumerate(config.steps) if step.filter is not None]
    if not steps:
        raise ConfigError("the recipe has no filter to look at", where=config.name, mend="add a step `filter`")
    read = config.read.model_copy(update={"limit": limit})
    nowhere = Path(tempfile.gettempdir(), "tidewheel-preview-writes-nothing")
    job = resolve(config.model_copy(update={"read": read}), input=input, output=str(nowhere))
    table, bad = _documents(job)
    if not len(table):
        told = ", ".join(f"{reason} {count}" for reason, count in bad.items())
        raise InputError(f"no document can be read ({told or 'the files are empty'})", where=job.input,
                         mend="`tidewheel data run --dry-run` shows the first record of each format")
    texts = [text[:TEXT_CHARACTERS] for text in table["text"].to_pylist()]
    statistics: list[dict[str, float]] = [{} for _ in texts]
    fixed: list[list[str]] = [[] for _ in texts]
    thresholds: list[Threshold] = []
    for number, step in steps:
        for rule in step.filters:
            kind, filter = name_of(type(rule)), filters.received(*job.bound(rule))
            judged = filters.judge([filter], table)
            own = _thresholds(f"steps.{number}.filter.{kind}", kind, filter)
            thresholds += own
            failing = np.zeros(len(table), bool)
            for name, values in judged.statistics.items():
                for row, value in enumerate(values.tolist()):
                    statistics[row][f"{number}.{kind}.{name}"] = round(value, 6)
            for each in own:
                values = judged.statistics[each.statistic].round(6)
                failing |= values < each.limit if each.side == "least" else values > each.limit
            for row in np.flatnonzero((judged.reasons != "") & ~failing).tolist():
                fixed[row].append(str(judged.reasons[row]))
            if not step.annotate:
                table = _as_left(table, judged)
    shown = [Shown(*row) for row in zip(table["id"].to_pylist(), table["source"].to_pylist(), texts, statistics, fixed,
                                        strict=True)]
    return Preview(shown, thresholds, bad)


def _documents(job: Job) -> tuple[pa.Table, dict[str, int]]:
    """(documents, records that cannot be used by reason)."""
    records, bad = [], Counter[str]()
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
    found = []
    number = prefix.split(".")[1]
    names = _settings_of_limits(settings)
    for statistic, limits in settings.limits().items():
        for side, limit in zip(("least", "most"), limits, strict=True):
            if limit is not None:
                name = names.get((statistic, side), "")
                found.append(Threshold(kind, f"{number}.{kind}.{statistic}", statistic, side, float(limit),
                                       f"{prefix}.{name}" if name else ""))
    return found


def _settings_of_limits(settings: Filter) -> dict[tuple[str, str], str]:
    """Names of the settings behind (statistic, side): those that a limit follows when they are changed."""
    found = {}
    for name in type(settings).model_fields:
        if isinstance(getattr(settings, name), int | float) and not isinstance(getattr(settings, name), bool):
            marked = settings.model_copy(update={name: _MARK})
            for statistic, limits in marked.limits().items():
                for side, limit in zip(("least", "most"), limits, strict=True):
                    if limit == _MARK:
                        found[statistic, side] = name
    return found


def _as_left(table: pa.Table, judged: filters.Judged) -> pa.Table:
    """The documents as the filter leaves them; those that it drops stay."""
    table = table.set_column(1, table.schema.field("text"), pa.chunked_array([judged.texts]))
    if judged.metas is not None:
        table = table.set_column(3, table.schema.field("meta"), pa.chunked_array([judged.metas]))
    return table
