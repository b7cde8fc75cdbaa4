"""Collect the results of filters on the documents of one unit: verdicts, samples, histograms and annotations.

All stages that filter use it, whether they read files or partitions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import verdicts
from tidewheel.data.config import FilterStep
from tidewheel.data.filter import Filter
from tidewheel.data.stage import Cost, UnitWriter, summed
from tidewheel.data.stages import filters, histograms
from tidewheel.versions import Version

VERSION = Version("filtering", uses=(verdicts.VERSION, histograms.VERSION))
"""Version of how verdicts, edits and statistics of filters are written; each filter has its own version."""
HEADS = pa.schema([("id", pa.string()), ("reason", pa.string()), ("head", pa.string()), ("after", pa.string())])
Group = tuple[bool, list[Filter]]
"""(annotate, filters) of one step, or of several consecutive steps with the same `annotate`."""


def grouped(steps: Sequence[FilterStep], serialize: Callable[[Filter], list[Any]] = filters.bound) -> list[Any]:
    """Return the filters of consecutive steps, grouped by `annotate`, as JSON values.

    Args:
        steps: the steps.
        serialize: returns a filter as JSON values: `Job.bound` for workers, `Job.identity` for unit keys.
    """
    return [[annotate, [serialize(filter) for step in group for filter in step.filters]]
            for annotate, group in itertools.groupby(steps, lambda step: step.annotate)]


def groups(inputs: Sequence[Any]) -> list[Group]:
    """Return the groups from the JSON values that `grouped` returned."""
    return [(annotate, [filters.received(*values) for values in serialized]) for annotate, serialized in inputs]


@dataclass
class Passed:
    """Documents that filters keep.

    Args:
        table: n documents with their current texts and metas.
        changed: whether a document's text was edited, bool [n].
        quality: float32 [n]; None if no filter returns it.
    """

    table: pa.Table
    changed: np.ndarray
    quality: np.ndarray | None = None


@dataclass
class Outcomes:
    """Collector of the decisions of a unit's filters, batch by batch."""

    judged: list[pa.Table] = field(default_factory=list)
    heads: list[pa.Table] = field(default_factory=list)
    histograms: list[dict[str, histograms.Histogram]] = field(default_factory=list)
    annotations: list[pa.Table] = field(default_factory=list)
    edited: int = 0
    dropped: int = 0
    costs: dict[str, Cost] = field(default_factory=dict)

    def apply(self, group: Sequence[Group], table: pa.Table) -> Passed:
        """Judge documents (columns of `DOCUMENT_SCHEMA`, and any others) and return the ones that stay."""
        measured: dict[str, histograms.Histogram] = {}
        passed = Passed(table, np.zeros(len(table), bool))
        for annotate, applied in group:
            judged = filters.judge(applied, passed.table)
            measured |= judged.histograms
            self.costs = summed([self.costs, {name: Cost(len(passed.table), seconds)
                                              for name, seconds in judged.seconds.items()}])
            if annotate:
                self.annotations.append(_annotations(passed.table, judged))
            else:
                passed = self._take(passed, judged)
        self.histograms.append(measured)
        self.edited += int(passed.changed.sum())
        return passed

    def _take(self, passed: Passed, judged: filters.Judged) -> Passed:
        """Record the verdicts, and return the documents that stay, as edited by the filters."""
        table = passed.table
        changed = passed.changed.copy()
        for edit in judged.edits:
            self._record(verdicts.rows(verdicts.EDIT, table["id"].take(pa.array(edit.rows)), edit.reason,
                                       details=edit.details), edit.rows, edit.before, edit.after)
            changed[edit.rows] = True
        is_dropped = judged.reasons != ""
        if is_dropped.any():
            rows = np.flatnonzero(is_dropped)
            self._record(verdicts.rows(verdicts.DROP, table["id"].take(pa.array(rows)), judged.reasons[rows].tolist()),
                         rows, judged.texts, None)
            self.dropped += len(rows)
        if judged.edits:
            table = _replaced(table, "text", judged.texts)
        if judged.metas is not None:
            table = _replaced(table, "meta", judged.metas)
        quality = passed.quality if judged.quality is None else judged.quality
        if not is_dropped.any():
            return Passed(table, changed, quality)
        kept_quality = None if quality is None else quality[~is_dropped]
        return Passed(table.filter(pa.array(~is_dropped)), changed[~is_dropped], kept_quality)

    def _record(self, rows: pa.Table, indices: np.ndarray, before: pa.Array, after: pa.Array | None) -> None:
        """Record verdicts on the documents `indices`, and the texts that samples may show of them."""
        sampled = verdicts.sampled(rows)
        shown: list[tuple[str, str | None]] = []
        for index in indices[sampled].tolist():
            text = before[index].as_py()
            shown.append((verdicts.head(text), None) if after is None else verdicts.change(text, after[index].as_py()))
        picked = rows.take(pa.array(sampled))
        self.judged.append(rows)
        self.heads.append(pa.table([picked["id"], picked["reason"], pa.array([head for head, _ in shown], pa.string()),
                                    pa.array([changed for _, changed in shown], pa.string())], schema=HEADS))

    def verdicts(self) -> pa.Table:
        """Return all verdicts, sorted by id."""
        return verdicts.merge(self.judged)

    def samples_of(self) -> pa.Table:
        """Return `HEADS` of at least the documents that samples show."""
        return pa.concat_tables([HEADS.empty_table(), *self.heads])

    def write_annotations(self, writer: UnitWriter, stage: str) -> None:
        """Write `annotations/<stage>/*.parquet` if the stage annotates.

        The columns are id, source, float32 statistics by name, and would_drop (the reason; "" for a document that
        would stay). Rows are sorted by id.
        """
        if self.annotations:
            table = pa.concat_tables(self.annotations, promote_options="default")
            writer.shared("annotations", f"annotations/{stage}", ".parquet", verdicts.encode(table.sort_by("id")))

    def summary(self) -> dict[str, Any]:
        """Return edited (number of edited documents that stay), histograms, would_drop (documents by reason)."""
        would_drop: Counter[str] = Counter()
        for table in self.annotations:
            would_drop.update(reason for reason in table["would_drop"].to_pylist() if reason)
        return {"edited": self.edited, "histograms": histograms.merge(self.histograms),
                "would_drop": dict(sorted(would_drop.items()))}


def _annotations(table: pa.Table, judged: filters.Judged) -> pa.Table:
    columns = {name: pa.array(values, pa.float32()) for name, values in judged.statistics.items()}
    return pa.table({"id": table["id"], "source": table["source"], **columns,
                     "would_drop": pa.array(judged.reasons.tolist(), pa.string())})


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    column = table.schema.get_field_index(name)
    return table.set_column(column, table.schema.field(column), values.cast(table.schema.field(column).type))
