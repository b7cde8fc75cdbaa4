"""Row-local filters: judged on one document at a time, fused into reading when they lead the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.config import Config
from tidewheel.data import text
from tidewheel.data.filters import (
    c4,
    classifier,
    fineweb,
    language,
    own,
    pii,
    quality,
    refinedweb,
    repetition,
    urls,
    words,
)
from tidewheel.data.stages import histograms
from tidewheel.data.text import textpass
from tidewheel.versions import Version


@dataclass(frozen=True)
class Rule:
    """How a filter is applied.

    Args:
        settings: the class of its settings; `settings.limits()` gives (smallest, largest) kept value by statistic.
        apply: what judges n documents: (texts, settings) -> (reasons, statistics). Reasons are n strings, "" = keep;
            statistics float64 [n] by name.
        edits: reason in the verdict of a document whose text it changes. `apply` then also gives the n texts as they
            are to be: (texts, settings) -> (reasons, statistics, texts).
        detail: statistics told in that verdict.
        by_document: `apply` looks at more than the text: (table, settings) -> (reasons, statistics[, metas[,
            quality]]), the table with columns id, text, source and meta. `metas`: n JSON objects that take the place
            of meta, or None; `quality`: float32 [n] for the order in which duplicates are kept, or None.
        writes: it gives metas or quality.
        version: of its outcome.
        measures: what `textpass.measure` is asked for this filter; `apply` then takes what it found as third argument.
    """

    settings: type[Config]
    apply: Callable[..., tuple[Any, ...]]
    version: Version
    edits: str = ""
    detail: tuple[str, ...] = ()
    by_document: bool = False
    writes: bool = False
    measures: str = ""

    @property
    def changes(self) -> bool:
        """Documents may leave it other than they came, so that a partition has to be written again."""
        return bool(self.edits) or self.writes


_FILTERS: dict[str, Rule] = {
    "urls": Rule(urls.UrlFilter, urls.url_filter, Version("filter_urls"), by_document=True),
    "language": Rule(language.Language, language.language, Version("filter_language"), by_document=True, writes=True),
    "gopher_repetition": Rule(repetition.GopherRepetition, repetition.gopher_repetition,
                              Version("filter_gopher_repetition", uses=(textpass.VERSION,)), measures="repetition"),
    "gopher_quality": Rule(quality.GopherQuality, quality.gopher_quality,
                           Version("filter_gopher_quality", uses=(textpass.VERSION,)), measures="quality"),
    "c4": Rule(c4.C4, c4.c4, Version("filter_c4", 2, uses=(textpass.VERSION,)), edits="c4_lines",
               detail=("c4_removed_lines",), measures="c4"),
    "fineweb": Rule(fineweb.FineWeb, fineweb.fineweb, Version("filter_fineweb", uses=(textpass.VERSION,)),
                    measures="fineweb"),
    "refinedweb": Rule(refinedweb.RefinedWeb, refinedweb.refinedweb,
                       Version("filter_refinedweb", uses=(text.VERSION,)), edits="refinedweb_lines",
                       detail=("refinedweb_removed_lines", "refinedweb_cut_phrases")),
    "words": Rule(words.WordFilter, words.word_filter, Version("filter_words", uses=(text.VERSION,))),
    "classifier": Rule(classifier.Classifier, classifier.classifier, Version("filter_classifier"), by_document=True,
                       writes=True),
    "pii": Rule(pii.Pii, pii.pii, Version("filter_pii"), edits="pii_replaced",
                detail=("pii_emails", "pii_addresses")),
}
NAMES = tuple(_FILTERS)
OWN = Version("own_filters")
"""How filters of the user's own are applied; their source is in the keys beside this."""


@dataclass(frozen=True)
class Edited:
    """What one filter changed.

    Args:
        reason: `Rule.edits`.
        rows: documents, int64 [m].
        details: m JSON objects: bytes_before, bytes_after and `Rule.detail`.
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
    """

    reasons: np.ndarray
    texts: pa.LargeStringArray
    edits: list[Edited] = field(default_factory=list)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, histograms.Histogram] = field(default_factory=dict)
    metas: pa.StringArray | None = None
    quality: np.ndarray | None = None


def settings_of(kind: str, values: dict[str, Any]) -> Config:
    """The settings of a filter from its JSON form."""
    return own.received(kind, values) if own.is_own(kind) else _FILTERS[kind].settings.model_validate(values)


def _rule(kind: str, settings: Config | None = None) -> Rule | None:
    """Return how the filter `kind` is applied; None if there is none of this name."""
    if not own.is_own(kind):
        return _FILTERS.get(kind)
    found = type(settings) if isinstance(settings, own.Filter) else own.find(kind)

    def apply(table: pa.Table, given: own.Filter) -> tuple[Any, ...]:
        return own.judged(kind, given, table)

    return Rule(found, apply, OWN, edits=found.edits, by_document=True)


def versions(kinds: Iterable[str]) -> tuple[Version, ...]:
    """Return the versions of these filters, for the keys of units that apply them."""
    return tuple(OWN if own.is_own(kind) else _FILTERS[kind].version for kind in kinds)


def changes(kinds: Sequence[str]) -> bool:
    """Whether one of the filters may change documents, not only drop them."""
    return any(rule.changes for kind in kinds if (rule := _rule(kind)) is not None)


def judge(rules: Sequence[tuple[str, Config]], table: pa.Table) -> Judged:
    """Apply filters, one after the other; each sees the texts and metas that those before it leave.

    Args:
        rules: (name, settings) in order.
        table: documents, columns id, text, source and meta (`DOCUMENT_SCHEMA`).
    """
    judged = Judged(np.full(len(table), "", dtype=object), _texts(table["text"]))
    measured: textpass.Measured | None = None  # of the texts as they are now
    asked: dict[str, Any] = {}
    for place, (kind, settings) in enumerate(rules):
        rule = _rule(kind, settings)
        if rule is None or not isinstance(settings, rule.settings):
            raise ValueError(f"no such filter: {kind}; there are {', '.join(_FILTERS)}")
        if rule.measures and (measured is None or asked[rule.measures] not in (True, settings)):
            asked = _asked(rules[place:])
            measured = textpass.measure(judged.texts, **asked)
        verdict, statistics, *more = rule.apply(_view(table, judged) if rule.by_document else judged.texts, settings,
                                                *([measured] if rule.measures else []))
        keeps = judged.reasons == ""
        judged.reasons = np.where(keeps, np.array(verdict, dtype=object), judged.reasons)
        if rule.edits:
            rows = _edit(judged, kind, rule, more[0], statistics)
            if measured is not None and len(rows):
                rest = _asked(rules[place + 1 :])
                known = rest and all(asked.get(name) == value for name, value in rest.items())
                measured, asked = textpass.again(measured, judged.texts, rows, **rest) if known else None, rest
        elif rule.by_document:
            metas, score = [*more, None, None][:2]
            judged.metas = judged.metas if metas is None else metas
            judged.quality = judged.quality if score is None else score
        limits = settings.limits()  # type: ignore[attr-defined]
        for name, values in statistics.items():
            judged.statistics[name] = values
            judged.histograms[name] = histograms.histogram(name, values, limits.get(name, (None, None)))
    return judged


def _asked(rules: Sequence[tuple[str, Config]]) -> dict[str, Any]:
    """What `textpass.measure` is to find for these filters: each for the first filter that asks."""
    found: dict[str, Any] = {}
    for kind, settings in rules:
        rule = _rule(kind, settings)
        if rule is not None and rule.measures:
            found.setdefault(rule.measures, settings if rule.measures in ("c4", "fineweb") else True)
    return found


def _view(table: pa.Table, judged: Judged) -> pa.Table:
    """The documents as a filter that looks at more than the text finds them."""
    columns = {"id": table["id"], "text": judged.texts, "source": table["source"],
               "meta": table["meta"] if judged.metas is None else judged.metas}
    return pa.table(columns)


def _edit(judged: Judged, kind: str, rule: Rule, edited: pa.Array, statistics: dict[str, np.ndarray]) -> np.ndarray:
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
    judged.reasons[rows[empty]] = f"{kind}_nothing_left"
    changed = changed.to_numpy(zero_copy_only=False).copy()
    changed[rows[empty]] = False
    rows = rows[~empty]
    judged.texts = pc.if_else(pa.array(changed), edited, before)
    sizes = [pc.binary_length(texts).to_numpy(zero_copy_only=False)[rows].tolist() for texts in (before, judged.texts)]
    counts = [statistics[name][rows].astype(np.int64).tolist() for name in rule.detail]
    details = [json.dumps(dict(zip(("bytes_before", "bytes_after", *rule.detail), values, strict=True)))
               for values in zip(*sizes, *counts, strict=True)]
    judged.edits.append(Edited(rule.edits, rows, details, before, judged.texts))
    return rows


def _texts(column: pa.Array | pa.ChunkedArray) -> pa.LargeStringArray:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.cast(pa.large_string())
