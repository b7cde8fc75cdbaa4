"""Apply single filters to texts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tidewheel.data.filter import FILTERS, Batch, Filter
from tidewheel.data.text.measures import Measures
from tidewheel.data.textpass import Measured


def everything() -> Measures:
    """Return all measures that the built-in filters request of a pass over a text."""
    return Measures.of_all(FILTERS.build(name).measures() for name in ("gopher_quality", "gopher_repetition", "fineweb",
                                                                       "c4"))


def judged(texts: Any, filter: Filter, measured: Measured | None = None) -> tuple[Any, ...]:
    """Return a filter's reasons and statistics; add the texts of a filter that edits, metas and quality if it writes.

    Args:
        texts: strings, a column, or a table of documents.
        measured: results of a pass over the texts, if there are any.
    """
    batch = Batch(texts, measured) if isinstance(texts, pa.Table) else Batch(Batch.of(texts).table, measured)
    verdicts = filter.apply(batch)
    more = (verdicts.texts,) if filter.EDITS else (verdicts.metas, verdicts.quality) if filter.WRITES else ()
    return verdicts.reasons, verdicts.statistics, *more
