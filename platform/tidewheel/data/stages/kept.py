"""Documents that a pipeline keeps: a few of them for the report, and tokens by source."""

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
_SPARE = 32  # candidates of a unit, of which the last stage may still drop some


class Kept:
    """What goes through the last stage of a unit: its sources, and the documents whose ids hash lowest."""

    def __init__(self) -> None:
        self._ids: list[pa.Array] = []
        self._sources: list[pa.Array] = []
        self._candidates: list[dict[str, Any]] = []

    def watch(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Yield the tables, and note what is in them."""
        for table in tables:
            self._ids += table["id"].cast(pa.string()).chunks
            self._sources += table["source"].cast(pa.string()).chunks
            self._note(table)
            yield table

    def _note(self, table: pa.Table) -> None:
        hashes = verdicts.hash_ids(table["id"])
        for row in np.argsort(hashes, kind="stable")[:_SPARE].tolist():
            self._candidates.append({
                "id": table["id"][row].as_py(), "order": int(hashes[row]), "source": table["source"][row].as_py(),
                "text": verdicts.head(table["text"][row].as_py())})
        self._candidates = sorted(self._candidates, key=_order)[:_SPARE]

    def samples(self, dropped: pa.Table | None = None) -> list[dict[str, Any]]:
        """Return a few documents, without those of the verdicts `dropped`."""
        gone = set(dropped["id"].to_pylist()) if dropped is not None else set[str]()
        return [each for each in self._candidates if each["id"] not in gone][:SAMPLES]

    def tokens(self, ids: pa.Array, sizes: np.ndarray) -> by_source.BySource:
        """Return {source: [documents, tokens]} of documents with these numbers of tokens."""
        if not len(ids):
            return {}
        places = pc.index_in(ids, value_set=pa.chunked_array(self._ids, pa.string()).combine_chunks())
        sources = pa.chunked_array(self._sources, pa.string()).combine_chunks().take(places)
        return by_source.tally(sources, pa.array(sizes, pa.int64()))


def merge(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the samples of a stage from those of its units, without the sort key."""
    pooled = [dict(each) for part in parts for each in part]
    return [{name: value for name, value in each.items() if name != "order"}
            for each in sorted(pooled, key=_order)[:SAMPLES]]


def _order(sample: Mapping[str, Any]) -> tuple[int, str]:
    return sample["order"], sample["id"]
