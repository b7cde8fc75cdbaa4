"""Filters applied to texts alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tidewheel.data.filter import FILTERS, Batch, Filter
from tidewheel.data.text.measures import Measures
from tidewheel.data.textpass import Measured


def everything() -> Measures:
    """Return all that a pass over a text can find, as the built-in filters ask for it."""
    return Measures.of_all(FILTERS.build(name).measures() for name in ("gopher_quality", "gopher_repetition", "fineweb",
                                                                       "c4"))


def judged(texts: Any, filter: Filter, measured: Measured | None = None) -> tuple[Any, ...]:
    """Return (reasons, statistics), with the texts of a filter that edits; metas and quality of one that writes them.

    Args:
        texts: strings, a column, or a table of documents.
        measured: what a pass over the texts found, where it was made already.
    """
    batch = Batch(texts, measured) if isinstance(texts, pa.Table) else Batch(Batch.of(texts).table, measured)
    verdicts = filter.apply(batch)
    more = (verdicts.texts,) if filter.EDITS else (verdicts.metas, verdicts.quality) if filter.WRITES else ()
    return verdicts.reasons, verdicts.statistics, *more
