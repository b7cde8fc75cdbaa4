"""What a stage decided about documents: a row for each it judged other than keep, and counts for the rest.

A document that a stage edits and then drops has a row for each. Rows are sorted by id, those of one id in the order
in which the stage decided.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tidewheel.versions import Version

VERSION = Version("verdicts")
VERDICT_SCHEMA = pa.schema([
    pa.field("id", pa.string(), nullable=False),
    pa.field("verdict", pa.string(), nullable=False),  # drop, edit, or keep where something was found
    pa.field("reason", pa.string(), nullable=False),
    pa.field("score", pa.float64()),  # what the rule measured, where it measures
    pa.field("survivor", pa.string()),  # id of the document that stays in its place, for duplicates
    pa.field("detail", pa.string(), nullable=False),  # JSON object, or empty
])
SAMPLES = 3
SAMPLE_CHARACTERS = 200
_CONTEXT = 40  # characters that a sample of an edit shows before the first change
DROP, EDIT, KEEP = "drop", "edit", "keep"


def drops(ids: pa.Array | pa.ChunkedArray, reasons: Sequence[str] | str, *, scores: Any = None, survivors: Any = None,
          details: Sequence[str] | None = None) -> pa.Table:
    """Verdict rows "drop" for `ids`, sorted by id and reason; `VERDICT_SCHEMA`."""
    table = rows(DROP, ids, reasons, scores=scores, survivors=survivors, details=details)
    return table.sort_by([("id", "ascending"), ("reason", "ascending")])


def rows(verdict: str, ids: pa.Array | pa.ChunkedArray, reasons: Sequence[str] | str, *, scores: Any = None,
         survivors: Any = None, details: Sequence[str] | None = None) -> pa.Table:
    """Rows of one verdict (`DROP`, `EDIT` or `KEEP`) in the order of `ids`; `VERDICT_SCHEMA`."""
    count = len(ids)

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        if values is None:
            return pa.nulls(count, kind)
        found = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
        return found.cast(kind)

    given = [reasons] * count if isinstance(reasons, str) else reasons
    return pa.table([ids.cast(pa.string()), pa.array([verdict] * count, pa.string()), column(given, pa.string()),
                     column(scores, pa.float64()), column(survivors, pa.string()),
                     column(details if details is not None else [""] * count, pa.string())], schema=VERDICT_SCHEMA)


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows, sorted by id; rows of one id stay in the order in which they come."""
    return pa.concat_tables([VERDICT_SCHEMA.empty_table(), *tables]).sort_by("id")  # a stable sort


def dropped_ids(table: pa.Table) -> pa.ChunkedArray:
    """Ids of the documents that are gone; needs the columns id and verdict."""
    return table.filter(pc.equal(table["verdict"], DROP))["id"]


def edited(table: pa.Table) -> int:
    """How many documents were edited and not dropped after all."""
    ids = table.filter(pc.equal(table["verdict"], EDIT))["id"].unique()
    return int(pc.sum(pc.invert(pc.is_in(ids, value_set=dropped_ids(table).combine_chunks()))).as_py() or 0)


def encode(table: pa.Table) -> bytes:
    """Parquet bytes; equal rows give equal bytes."""
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", row_group_size=1 << 20)
    return sink.getvalue()


def decode(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows that `encode` wrote."""
    return pq.read_table(io.BytesIO(data), columns=list(columns) if columns is not None else None)


def without(table: pa.Table, dropped: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Table:
    """Rows of `table` whose `id` is in none of the columns `dropped`."""
    gone = [column for column in dropped if len(column)]
    if not gone or not table.num_rows:
        return table
    values = pa.chunked_array([chunk for column in gone for chunk in _chunks(column)], pa.string())
    return table.filter(pc.invert(pc.is_in(table["id"], value_set=values.combine_chunks())))


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def counts(table: pa.Table, verdict: str = DROP) -> dict[str, int]:
    """Rows of one verdict by reason."""
    found = table.filter(pc.equal(table["verdict"], verdict)).group_by("reason").aggregate([([], "count_all")])
    return dict(sorted(zip(found["reason"].to_pylist(), found["count_all"].to_pylist(), strict=True)))


def sampled(table: pa.Table) -> np.ndarray:
    """Rows that `samples` shows, int64: for each reason those whose ids hash lowest. Of a larger table they are a part
    of the union of those of its pieces."""
    hashes = hash_ids(table["id"])
    reasons = table["reason"].combine_chunks().dictionary_encode()
    codes = reasons.indices.to_numpy(zero_copy_only=False)
    found = [np.zeros(0, np.int64)]
    for code in np.argsort(np.array(reasons.dictionary.to_pylist(), dtype=object)).tolist():
        places = np.flatnonzero(codes == code)
        found.append(places[np.argsort(hashes[places], kind="stable")[:SAMPLES]])
    return np.concatenate(found)


def samples(table: pa.Table, documents: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """A few documents for each reason: those whose ids hash lowest, so that any split of work picks the same.

    Args:
        table: verdicts.
        documents: columns id and text (or head), at least the `sampled` ones. With a column `reason` a row is for
            that reason alone, and `after` may hold what an edit made of the text.
    """
    names = documents.column_names
    reasons = documents["reason"].to_pylist() if "reason" in names else [""] * len(documents)
    places = {key: place for place, key in enumerate(zip(documents["id"].to_pylist(), reasons, strict=True))}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sampled(table).tolist():
        reason = table["reason"][row].as_py()
        place = places.get((table["id"][row].as_py(), reason if "reason" in names else ""))
        found.setdefault(reason, []).append(_sample(table, row, documents, place))
    return found


def _sample(table: pa.Table, row: int, documents: pa.Table, place: int | None) -> dict[str, Any]:
    identity = table["id"][row].as_py()
    texts = documents["text" if "text" in documents.column_names else "head"]
    sample: dict[str, Any] = {"id": identity, "order": int(hash_ids([identity])[0]),
                              "text": "" if place is None else head(texts[place].as_py())}
    if place is not None and "after" in documents.column_names and documents["after"][place].is_valid:
        sample["after"] = documents["after"][place].as_py()
    for name in ("survivor", "score", "detail"):
        value = table[name][row].as_py()
        if value not in (None, ""):
            sample[name] = round(value, 6) if isinstance(value, float) else value
    return sample


def head(text: str) -> str:
    """The first characters of a text, as samples show them."""
    return text[:SAMPLE_CHARACTERS]


def change(before: str, after: str) -> tuple[str, str]:
    """What samples show of an edit: both texts from a little before the first difference."""
    length = min(len(before), len(after))
    same = next((place for place in range(length) if before[place] != after[place]), length)
    start = max(same - _CONTEXT, 0)
    return head(before[start:]), head(after[start:])


def merge_samples(parts: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Samples of a stage from those of its units, without the sort key."""
    pooled: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for reason, rows in part.items():
            pooled.setdefault(reason, []).extend(rows)
    return {reason: [{name: value for name, value in row.items() if name != "order"}
                     for row in sorted(rows, key=lambda row: (row["order"], row["id"]))[:SAMPLES]]
            for reason, rows in sorted(pooled.items())}


def hash_ids(ids: pa.Array | pa.ChunkedArray | Sequence[str], seed: int = 0) -> np.ndarray:
    """XXH3-64 of each id, uint64 [n]: partitions, samples and the validation split are chosen by it."""
    values = ids.to_pylist() if isinstance(ids, pa.Array | pa.ChunkedArray) else ids
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(value.encode(), seed) for value in values), np.uint64, len(values))


def partition_of(hashes: np.ndarray, partitions: int) -> np.ndarray:
    """Partition of each id, int32: ranges of the hash, so that partitions in order are documents in order of hash."""
    return ((hashes >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int32)
