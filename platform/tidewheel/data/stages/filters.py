"""Filters applied to documents: each sees what those before it left, and what they measure is measured once.

A filter travels to workers as JSON values, `bound`; for keys it is another form, `identity`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import textpass
from tidewheel.data.filter import FILTERS, OWN, Batch, Filter
from tidewheel.data.filter import judged as applied
from tidewheel.data.stages import histograms
from tidewheel.data.text.measures import Measures
from tidewheel.parts import CODE, Code, is_own, name_of, source_hash
from tidewheel.versions import Version

MEASURING = "one pass over the text, for the filters that share it"

@dataclass(frozen=True)
class Edited:
    """What one filter changed.

    Args:
        reason: `Filter.EDITS`.
        rows: documents, int64 [m].
        details: m JSON objects: bytes_before, bytes_after and `Filter.DETAILS`.
        before, after: the texts of all n documents before and after this filter.
    """

    reason: str
    rows: np.ndarray
    details: list[str]
    before: pa.LargeStringArray
    after: pa.LargeStringArray


@dataclass
class Judged:
    """What filters made of n documents.

    Args:
        reasons: object [n], "" = keep, else that of the first filter that drops the document.
        texts: the texts after all edits; those of dropped documents as they were when they were dropped.
        edits: what was changed, filter by filter; only of documents that the filter and those before it keep.
        statistics: float64 [n] by name.
        histograms: of the statistics, over all n documents.
        metas: JSON objects in place of meta; None when no filter gives them.
        quality: float32 [n]; None when no filter gives it.
        seconds: taken by each filter, and by the pass that measures for several (`MEASURING`).
    """

    reasons: np.ndarray
    texts: pa.LargeStringArray
    edits: list[Edited] = field(default_factory=list)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, histograms.Histogram] = field(default_factory=dict)
    metas: pa.StringArray | None = None
    quality: np.ndarray | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block for a filter."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def bound(filter: Filter, references: Mapping[str, str] | None = None) -> list[Any]:
    """Return the JSON form of a filter for workers: name, settings, and where code from outside the package is.

    Args:
        references: of the files in its settings, by path (`resources`).
    """
    code = Code.of(type(filter))
    if references is not None:
        filter = filter.with_files(references.__getitem__)
    return [name_of(type(filter)), filter.canonical(), None if code is None else asdict(code)]


def received(name: str, settings: Mapping[str, Any], code: Mapping[str, str] | None) -> Filter:
    """Return a filter from what `bound` gave.

    Raises:
        ConfigError: its module is not on this node, or has another source here.
    """
    if code is not None:
        Code(**code).arrive()
    return FILTERS.build(name, settings)


def identity(filter: Filter, references: Mapping[str, str] | None = None) -> list[Any]:
    """Return the JSON form of a filter for unit keys: its name, the settings that differ from their defaults with the
    content of files in place of their paths, and the source of code from outside the package."""
    name = name_of(type(filter))
    if references is not None:
        known = references
        filter = filter.with_files(lambda path: known[path].partition("@")[0])
    code = {CODE: source_hash(type(filter))} if is_own(name) else {}
    return [name, {**filter.settings(), **filter.packages(), **code}]


def versions(filters: Iterable[Filter]) -> tuple[Version, ...]:
    """Return the versions of these filters, for the keys of units that apply them."""
    return tuple(OWN if is_own(name_of(type(filter))) else _version(filter) for filter in filters)


def _version(filter: Filter) -> Version:
    if filter.VERSION is None:
        raise ValueError(f"the filter {name_of(type(filter))} has no VERSION")
    return filter.VERSION


def judge(filters: Sequence[Filter], table: pa.Table) -> Judged:
    """Apply filters, one after the other; each sees the texts and metas that those before it leave.

    Args:
        table: documents, columns id, text, source and meta (`DOCUMENT_SCHEMA`).
    """
    judged = Judged(np.full(len(table), "", dtype=object), _texts(table["text"]))
    measured: textpass.Measured | None = None  # of the texts as they are now
    asked = Measures()
    for place, filter in enumerate(filters):
        needs = filter.measures()
        if needs is not None and (measured is None or not asked.covers(needs)):
            asked = Measures.of_all(rule.measures() for rule in filters[place:])
            with judged.timed(MEASURING):
                measured = textpass.measure(judged.texts, asked)
        name = name_of(type(filter))
        with judged.timed(name):
            verdicts = applied(filter, Batch(_view(table, judged), None if needs is None else measured))
        keeps = judged.reasons == ""
        judged.reasons = np.where(keeps, np.array(verdicts.reasons, dtype=object), judged.reasons)
        if verdicts.texts is not None:
            rows = _edit(judged, name, filter, verdicts.texts, verdicts.statistics)
            if measured is not None and len(rows):
                rest = Measures.of_all(rule.measures() for rule in filters[place + 1 :])
                with judged.timed(MEASURING):
                    measured = textpass.again(measured, judged.texts, rows, rest) if _known(asked, rest) else None
                asked = rest
        judged.metas = judged.metas if verdicts.metas is None else verdicts.metas
        judged.quality = judged.quality if verdicts.quality is None else verdicts.quality
        limits = filter.limits()
        for statistic, values in verdicts.statistics.items():
            judged.statistics[statistic] = values
            judged.histograms[statistic] = histograms.histogram(statistic, values,
                                                                limits.get(statistic, (None, None)))
    return judged


def _known(asked: Measures, rest: Measures) -> bool:
    """Whether filters that follow want measures, and none that were not made."""
    return bool(rest.asked()) and asked.covers(rest)


def _view(table: pa.Table, judged: Judged) -> pa.Table:
    """The documents as a filter that looks at more than the text finds them."""
    columns = {"id": table["id"], "text": judged.texts, "source": table["source"],
               "meta": table["meta"] if judged.metas is None else judged.metas}
    return pa.table(columns)


def _edit(judged: Judged, name: str, filter: Filter, edited: pa.Array, statistics: Mapping[str, np.ndarray]
          ) -> np.ndarray:
    """Take over the texts of documents that are still there: which ones, int64 [m]. One without any text left is
    dropped."""
    before, edited = judged.texts, _texts(edited)
    keeps = pa.array(judged.reasons == "")
    changed = pc.and_(keeps, pc.not_equal(before, edited))
    rows = np.flatnonzero(changed.to_numpy(zero_copy_only=False))
    if not len(rows):
        return rows
    places = pa.array(rows)
    empty = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(edited.take(places))), 0).to_numpy(zero_copy_only=False)
    judged.reasons[rows[empty]] = f"{name}_nothing_left"
    changed = changed.to_numpy(zero_copy_only=False).copy()
    changed[rows[empty]] = False
    rows = rows[~empty]
    judged.texts = pc.if_else(pa.array(changed), edited, before)
    sizes = [pc.binary_length(texts).to_numpy(zero_copy_only=False)[rows].tolist() for texts in (before, judged.texts)]
    counts = [statistics[detail][rows].astype(np.int64).tolist() for detail in filter.DETAILS]
    details = [json.dumps(dict(zip(("bytes_before", "bytes_after", *filter.DETAILS), values, strict=True)))
               for values in zip(*sizes, *counts, strict=True)]
    judged.edits.append(Edited(filter.EDITS, rows, details, before, judged.texts))
    return rows


def _texts(column: pa.Array | pa.ChunkedArray) -> pa.LargeStringArray:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.cast(pa.large_string())
