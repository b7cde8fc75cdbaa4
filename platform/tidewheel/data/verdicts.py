"""What a stage decided about documents: one row for each it judged other than keep, and counts for the rest."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

VERDICT_SCHEMA = pa.schema([
    pa.field("id", pa.string(), nullable=False),
    pa.field("verdict", pa.string(), nullable=False),  # drop or edit
    pa.field("reason", pa.string(), nullable=False),
    pa.field("score", pa.float64()),  # what the rule measured, where it measures
    pa.field("survivor", pa.string()),  # id of the document that stays in its place, for duplicates
    pa.field("detail", pa.string(), nullable=False),  # JSON object, or empty
])
SAMPLES = 3
SAMPLE_CHARACTERS = 200


def drops(ids: pa.Array, reasons: Sequence[str] | str, *, scores: Any = None, survivors: Any = None,
          details: Sequence[str] | None = None) -> pa.Table:
    """Verdict rows "drop" for `ids`, sorted by id and reason; `VERDICT_SCHEMA`."""
    count = len(ids)

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        if values is None:
            return pa.nulls(count, kind)
        found = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
        return found.cast(kind)

    given = [reasons] * count if isinstance(reasons, str) else reasons
    table = pa.table([ids.cast(pa.string()), pa.array(["drop"] * count, pa.string()), column(given, pa.string()),
                      column(scores, pa.float64()), column(survivors, pa.string()),
                      column(details if details is not None else [""] * count, pa.string())], schema=VERDICT_SCHEMA)
    return table.sort_by([("id", "ascending"), ("reason", "ascending")])


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


def counts(table: pa.Table) -> dict[str, int]:
    """Rows by reason."""
    found = table.group_by("reason").aggregate([([], "count_all")])
    return dict(sorted(zip(found["reason"].to_pylist(), found["count_all"].to_pylist(), strict=True)))


def samples(table: pa.Table, documents: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """A few dropped documents for each reason: those whose ids hash lowest, so that any split of work picks the same.

    Args:
        table: verdicts.
        documents: columns id and text (or head), at least the dropped ones.
    """
    places = {identity: place for place, identity in enumerate(documents["id"].to_pylist())}
    texts = documents["text" if "text" in documents.column_names else "head"]
    found: dict[str, list[dict[str, Any]]] = {}
    hashes = hash_ids(table["id"])
    reasons = np.array(table["reason"].to_pylist(), dtype=object)
    for reason in sorted(set(reasons)):
        rows = np.flatnonzero(reasons == reason)
        rows = rows[np.argsort(hashes[rows], kind="stable")[:SAMPLES]]
        found[str(reason)] = [_sample(table, int(row), int(hashes[row]), texts, places) for row in rows]
    return found


def _sample(table: pa.Table, row: int, order: int, texts: Any, places: dict[str, int]) -> dict[str, Any]:
    identity = table["id"][row].as_py()
    sample: dict[str, Any] = {"id": identity, "order": order,
                              "text": head(texts[places[identity]].as_py()) if identity in places else ""}
    for name in ("survivor", "score", "detail"):
        value = table[name][row].as_py()
        if value not in (None, ""):
            sample[name] = round(value, 6) if isinstance(value, float) else value
    return sample


def head(text: str) -> str:
    """The first characters of a text, as samples show them."""
    return text[:SAMPLE_CHARACTERS]


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
