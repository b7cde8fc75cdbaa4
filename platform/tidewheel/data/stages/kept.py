"""Observe the documents that a pipeline keeps: sample a few for the report, and count tokens by source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import verdicts
from tidewheel.data.stages import by_source
from tidewheel.versions import Version

VERSION = Version("kept", uses=(verdicts.VERSION, by_source.VERSION))
SAMPLES = 6
_SPARE = 32
"""Candidates of a unit: more than `SAMPLES`, because the last stage may still drop some."""


class Kept:
    """Observer of the documents of one unit of the last stage: their sources, and those with the lowest id hashes."""

    def __init__(self) -> None:
        self._ids: list[pa.Array] = []
        self._sources: list[pa.Array] = []
        self._candidates: list[dict[str, Any]] = []

    def watch(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Yield the tables unchanged, and observe their documents."""
        for table in tables:
            self._ids += table["id"].cast(pa.string()).chunks
            self._sources += table["source"].cast(pa.string()).chunks
            self._add_candidates(table)
            yield table

    def _add_candidates(self, table: pa.Table) -> None:
        hashes = verdicts.hash_ids(table["id"])
        for row in np.argsort(hashes, kind="stable")[:_SPARE].tolist():
            self._candidates.append({
                "id": table["id"][row].as_py(), "order": int(hashes[row]), "source": table["source"][row].as_py(),
                "text": verdicts.head(table["text"][row].as_py())})
        self._candidates = sorted(self._candidates, key=_order)[:_SPARE]

    def samples(self, dropped: pa.Table | None = None) -> list[dict[str, Any]]:
        """Return a few documents, without the ones that the verdicts `dropped` name."""
        dropped_ids = set(dropped["id"].to_pylist()) if dropped is not None else set[str]()
        return [candidate for candidate in self._candidates if candidate["id"] not in dropped_ids][:SAMPLES]

    def tokens(self, ids: pa.Array, sizes: np.ndarray) -> by_source.BySource:
        """Return {source: [documents, tokens]}.

        Args:
            ids: ids of n documents.
            sizes: tokens of each document, int64 [n].
        """
        if not len(ids):
            return {}
        rows = pc.index_in(ids, value_set=pa.chunked_array(self._ids, pa.string()).combine_chunks())
        sources = pa.chunked_array(self._sources, pa.string()).combine_chunks().take(rows)
        return by_source.tally(sources, pa.array(sizes, pa.int64()))


def merge(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the samples of a stage from those of its units, without the sort key."""
    pooled = [dict(sample) for part in parts for sample in part]
    return [{name: value for name, value in sample.items() if name != "order"}
            for sample in sorted(pooled, key=_order)[:SAMPLES]]


def _order(sample: Mapping[str, Any]) -> tuple[int, str]:
    return sample["order"], sample["id"]
