"""Apply filters to documents. Each filter sees the results of those before it, and shared measures are made once.

`bound` returns a filter as JSON values for workers; `identity` returns the form that unit keys use.
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
    """Changes made by one filter.

    Args:
        reason: `Filter.EDITS`.
        rows: indices of the changed documents, int64 [m].
        details: m JSON objects with bytes_before, bytes_after and `Filter.DETAILS`.
        before: texts of all n documents before this filter.
        after: texts of all n documents after this filter.
    """

    reason: str
    rows: np.ndarray
    details: list[str]
    before: pa.LargeStringArray
    after: pa.LargeStringArray


@dataclass
class Judged:
    """Results of filters on n documents.

    Args:
        reasons: object [n]; "" to keep, else the reason of the first filter that drops the document.
        texts: texts after all edits; of a dropped document, its text when it was dropped.
        edits: changes by each filter, of documents that the filter and those before it keep.
        statistics: float64 [n] by name.
        histograms: histograms of the statistics over all n documents.
        metas: JSON objects that replace meta; None if no filter returns them.
        quality: float32 [n]; None if no filter returns it.
        seconds: seconds taken by each filter, and by the pass that measures for several (`MEASURING`).
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
        """Add the duration of the block to a filter's seconds."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def bound(filter: Filter, references: Mapping[str, str] | None = None) -> list[Any]:
    """Return a filter as JSON values for workers: name, settings, and the location of code from outside the package.

    Args:
        filter: the filter.
        references: references of the files in its settings, by path (see `resources`).
    """
    code = Code.of(type(filter))
    if references is not None:
        filter = filter.with_files(references.__getitem__)
    return [name_of(type(filter)), filter.canonical(), None if code is None else asdict(code)]


def received(name: str, settings: Mapping[str, Any], code: Mapping[str, str] | None) -> Filter:
    """Return the filter from the values that `bound` returned.

    Args:
        name: name of the filter.
        settings: its settings.
        code: location of its code; None for a built-in filter.

    Raises:
        ConfigError: the filter's module is missing on this node, or has a different source here.
    """
    if code is not None:
        Code(**code).load()
    return FILTERS.build(name, settings)


def identity(filter: Filter, references: Mapping[str, str] | None = None) -> list[Any]:
    """Return a filter as JSON values for unit keys.

    They hold its name, the settings that differ from their defaults (with the content of files instead of their
    paths), and the source of code from outside the package.
    """
    name = name_of(type(filter))
    if references is not None:
        known = references
        filter = filter.with_files(lambda path: known[path].partition("@")[0])
    code = {CODE: source_hash(type(filter))} if is_own(name) else {}
    return [name, {**filter.settings(), **filter.packages(), **code}]


def versions(filters: Iterable[Filter]) -> tuple[Version, ...]:
    """Return the versions of filters, for the keys of units that apply them."""
    return tuple(OWN if is_own(name_of(type(filter))) else _version(filter) for filter in filters)


def _version(filter: Filter) -> Version:
    if filter.VERSION is None:
        raise ValueError(f"the filter {name_of(type(filter))} has no VERSION")
    return filter.VERSION


def judge(filters: Sequence[Filter], table: pa.Table) -> Judged:
    """Apply filters one after another; each sees the texts and metas that those before it return.

    Args:
        filters: the filters.
        table: documents with the columns id, text, source and meta (`DOCUMENT_SCHEMA`).
    """
    judged = Judged(np.full(len(table), "", dtype=object), _texts(table["text"]))
    measured: textpass.Measured | None = None  # measures of the current texts
    asked = Measures()
    for index, filter in enumerate(filters):
        needs = filter.measures()
        if needs is not None and (measured is None or not asked.covers(needs)):
            asked = Measures.of_all(other.measures() for other in filters[index:])
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
                rest = Measures.of_all(other.measures() for other in filters[index + 1 :])
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
    """Return whether the remaining filters need measures, and all of these are available."""
    return bool(rest.asked()) and asked.covers(rest)


def _view(table: pa.Table, judged: Judged) -> pa.Table:
    """Return the documents with their current texts and metas."""
    columns = {"id": table["id"], "text": judged.texts, "source": table["source"],
               "meta": table["meta"] if judged.metas is None else judged.metas}
    return pa.table(columns)


def _edit(judged: Judged, name: str, filter: Filter, edited: pa.Array, statistics: Mapping[str, np.ndarray]
          ) -> np.ndarray:
    """Take over the edited texts of documents that are not dropped yet; drop a document that has no text left.

    Returns:
        Indices of the edited documents, int64 [m].
    """
    before = judged.texts
    edited = _texts(edited)
    keeps = pa.array(judged.reasons == "")
    changed = pc.and_(keeps, pc.not_equal(before, edited))
    rows = np.flatnonzero(changed.to_numpy(zero_copy_only=False))
    if not len(rows):
        return rows
    indices = pa.array(rows)
    empty = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(edited.take(indices))), 0).to_numpy(zero_copy_only=False)
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
