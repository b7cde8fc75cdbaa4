"""What filters found in the documents of one unit: verdict rows, samples, histograms, annotations. Used by every stage
that filters, whether it reads files or partitions."""

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
"""How verdicts, edits and statistics of filters are written; each filter has a version of its own."""
HEADS = pa.schema([("id", pa.string()), ("reason", pa.string()), ("head", pa.string()), ("after", pa.string())])
#: Filters of one step, or of several in a row: (annotate, filters).
Group = tuple[bool, list[Filter]]


def grouped(steps: Sequence[FilterStep], told: Callable[[Filter], list[Any]] = filters.bound) -> list[Any]:
    """The groups of consecutive steps in JSON form: steps that follow each other and annotate alike are one. `told`
    gives the JSON form of a filter: `Job.bound` for workers, `Job.identity` for unit keys."""
    return [[annotate, [told(filter) for step in some for filter in step.filters]]
            for annotate, some in itertools.groupby(steps, lambda step: step.annotate)]


def groups(inputs: Sequence[Any]) -> list[Group]:
    """The groups from their JSON form."""
    return [(annotate, [filters.received(*told) for told in rules]) for annotate, rules in inputs]


@dataclass
class Passed:
    """Documents that go on: the table with texts, metas and (where a filter gives it) a column quality as they are
    now, and for each whether its text was changed, bool [n]."""

    table: pa.Table
    changed: np.ndarray
    quality: np.ndarray | None = None


@dataclass
class Outcomes:
    """Collects what the filters of a unit decide, batch by batch."""

    judged: list[pa.Table] = field(default_factory=list)
    heads: list[pa.Table] = field(default_factory=list)
    histograms: list[dict[str, histograms.Histogram]] = field(default_factory=list)
    annotations: list[pa.Table] = field(default_factory=list)
    edited: int = 0
    dropped: int = 0
    costs: dict[str, Cost] = field(default_factory=dict)

    def apply(self, group: Sequence[Group], table: pa.Table) -> Passed:
        """Judge documents (columns of `DOCUMENT_SCHEMA`, and any others, which stay beside them)."""
        found: dict[str, histograms.Histogram] = {}
        passed = Passed(table, np.zeros(len(table), bool))
        for annotate, rules in group:
            judged = filters.judge(rules, passed.table)
            found |= judged.histograms
            self.costs = summed([self.costs, {name: Cost(len(passed.table), seconds)
                                              for name, seconds in judged.seconds.items()}])
            if annotate:
                self.annotations.append(_annotations(passed.table, judged))
            else:
                passed = self._take(passed, judged)
        self.histograms.append(found)
        self.edited += int(passed.changed.sum())
        return passed

    def _take(self, passed: Passed, judged: filters.Judged) -> Passed:
        """Record the verdicts, and give the documents that go on as the filters leave them."""
        table, changed = passed.table, passed.changed.copy()
        for edit in judged.edits:
            self._record(verdicts.rows(verdicts.EDIT, table["id"].take(pa.array(edit.rows)), edit.reason,
                                       details=edit.details), edit.rows, edit.before, edit.after)
            changed[edit.rows] = True
        gone = judged.reasons != ""
        if gone.any():
            rows = np.flatnonzero(gone)
            self._record(verdicts.rows(verdicts.DROP, table["id"].take(pa.array(rows)), judged.reasons[rows].tolist()),
                         rows, judged.texts, None)
            self.dropped += len(rows)
        if judged.edits:
            table = _replaced(table, "text", judged.texts)
        if judged.metas is not None:
            table = _replaced(table, "meta", judged.metas)
        quality = passed.quality if judged.quality is None else judged.quality
        if not gone.any():
            return Passed(table, changed, quality)
        return Passed(table.filter(pa.array(~gone)), changed[~gone], None if quality is None else quality[~gone])

    def _record(self, rows: pa.Table, places: np.ndarray, before: pa.Array, after: pa.Array | None) -> None:
        """Verdict rows, those of `places`, and what samples may show of them."""
        chosen = verdicts.sampled(rows)
        pairs = [(before[place].as_py(), None if after is None else after[place].as_py())
                 for place in places[chosen].tolist()]
        shown = [(verdicts.head(text), None) if other is None else verdicts.change(text, other)
                 for text, other in pairs]
        picked = rows.take(pa.array(chosen))
        self.judged.append(rows)
        self.heads.append(pa.table([picked["id"], picked["reason"], pa.array([one for one, _ in shown], pa.string()),
                                    pa.array([other for _, other in shown], pa.string())], schema=HEADS))

    def verdicts(self) -> pa.Table:
        """All verdict rows, sorted by id."""
        return verdicts.merge(self.judged)

    def samples_of(self) -> pa.Table:
        """`HEADS` of at least the documents that samples show."""
        return pa.concat_tables([HEADS.empty_table(), *self.heads])

    def write_annotations(self, writer: UnitWriter, stage: str) -> None:
        """`annotations/<stage>/*.parquet`, when the stage annotates: columns id, source, float32 statistics by name,
        would_drop (the reason, "" = it would keep the document); sorted by id."""
        if self.annotations:
            table = pa.concat_tables(self.annotations, promote_options="default")
            writer.shared("annotations", f"annotations/{stage}", ".parquet", verdicts.encode(table.sort_by("id")))

    def summary(self) -> dict[str, Any]:
        """edited (documents that go on with another text), histograms, would_drop (documents by reason)."""
        would: Counter[str] = Counter()
        for table in self.annotations:
            would.update(reason for reason in table["would_drop"].to_pylist() if reason)
        return {"edited": self.edited, "histograms": histograms.merge(self.histograms),
                "would_drop": dict(sorted(would.items()))}


def _annotations(table: pa.Table, judged: filters.Judged) -> pa.Table:
    columns = {name: pa.array(values, pa.float32()) for name, values in judged.statistics.items()}
    return pa.table({"id": table["id"], "source": table["source"], **columns,
                     "would_drop": pa.array(judged.reasons.tolist(), pa.string())})


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), values.cast(table.schema.field(place).type))
