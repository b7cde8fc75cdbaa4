"""Samples of kept documents, and tokens by source."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidewheel.data import verdicts
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.stages import kept


def table(first: int, last: int) -> pa.Table:
    ids = [f"d{n}" for n in range(first, last)]
    return pa.table([ids, [f"text of {document_id} " * 40 for document_id in ids],
                     [f"s{n % 3}" for n in range(first, last)],
                     ["{}"] * len(ids)], schema=DOCUMENT_SCHEMA)


def samples(*bounds: tuple[int, int]) -> list[dict]:
    """Return samples of units, each of which gets its documents in two tables."""
    parts = []
    for first, last in bounds:
        seen = kept.Kept()
        middle = (first + last) // 2
        assert len(list(seen.watch([table(first, middle), table(middle, last)]))) == 2
        parts.append(seen.samples())
    return kept.merge(parts)


def test_samples_do_not_depend_on_the_split_of_the_work():
    whole = samples((0, 300))
    assert len(whole) == kept.SAMPLES
    assert whole == samples((0, 10), (10, 200), (200, 300)) == samples((100, 300), (0, 100))
    assert set(whole[0]) == {"id", "source", "text"}
    assert len(whole[0]["text"]) == verdicts.SAMPLE_CHARACTERS


def test_samples_exclude_documents_that_the_last_stage_drops():
    seen = kept.Kept()
    list(seen.watch([table(0, 50)]))
    first = seen.samples()[0]["id"]
    dropped = verdicts.drops(pa.array([first]), "refused")
    assert first not in [item["id"] for item in seen.samples(dropped)]
    assert len(seen.samples(dropped)) == kept.SAMPLES


def test_tokens_are_counted_by_source():
    seen = kept.Kept()
    list(seen.watch([table(0, 4), table(4, 7)]))
    result = seen.tokens(pa.array(["d6", "d0", "d1"]), np.array([5, 6, 7]))
    assert result == {"s0": [2, 11], "s1": [1, 7]}
    assert seen.tokens(pa.array([], pa.string()), np.zeros(0, np.int64)) == {}
