"""Verdicts of a stage on documents: a row for each document that it does not simply keep; the others are only counted.

A document that a stage edits and then drops has two rows. Rows are sorted by id; rows of one id are in the order of the
decisions.
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
    pa.field("verdict", pa.string(), nullable=False),  # drop, edit, or keep (of a document that is only annotated)
    pa.field("reason", pa.string(), nullable=False),
    pa.field("score", pa.float64()),  # measured value, for rules that measure
    pa.field("survivor", pa.string()),  # for duplicates, id of the document that stays
    pa.field("detail", pa.string(), nullable=False),  # JSON object, or empty
])
SAMPLES = 3
SAMPLE_CHARACTERS = 200
_CONTEXT = 40
"""Characters that a sample of an edit shows before the first change."""
DROP, EDIT, KEEP = "drop", "edit", "keep"


def drops(ids: pa.Array | pa.ChunkedArray, reasons: Sequence[str] | str, *, scores: Any = None, survivors: Any = None,
          details: Sequence[str] | None = None) -> pa.Table:
    """Return verdicts "drop", sorted by id and reason; `VERDICT_SCHEMA`.

    Args:
        ids: ids of n documents.
        reasons: n reasons, or one for all.
        scores: n measured values.
        survivors: ids of the n documents that stay.
        details: n JSON objects.
    """
    table = rows(DROP, ids, reasons, scores=scores, survivors=survivors, details=details)
    return table.sort_by([("id", "ascending"), ("reason", "ascending")])


def rows(verdict: str, ids: pa.Array | pa.ChunkedArray, reasons: Sequence[str] | str, *, scores: Any = None,
         survivors: Any = None, details: Sequence[str] | None = None) -> pa.Table:
    """Return rows of one verdict in the order of `ids`; `VERDICT_SCHEMA`.

    Args:
        verdict: `DROP`, `EDIT` or `KEEP`.
        ids: ids of n documents.
        reasons: n reasons, or one for all.
        scores: n measured values.
        survivors: ids of the n documents that stay.
        details: n JSON objects.
    """
    count = len(ids)

    def column(values: Any, kind: pa.DataType) -> pa.Array:
        if values is None:
            return pa.nulls(count, kind)
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
        return array.cast(kind)

    reasons = [reasons] * count if isinstance(reasons, str) else reasons
    return pa.table([ids.cast(pa.string()), pa.array([verdict] * count, pa.string()), column(reasons, pa.string()),
                     column(scores, pa.float64()), column(survivors, pa.string()),
                     column(details if details is not None else [""] * count, pa.string())], schema=VERDICT_SCHEMA)


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all rows, sorted by id; the sort is stable, so rows of one id stay in order."""
    return pa.concat_tables([VERDICT_SCHEMA.empty_table(), *tables]).sort_by("id")


def dropped_ids(table: pa.Table) -> pa.ChunkedArray:
    """Return the ids of dropped documents; the table needs the columns id and verdict."""
    return table.filter(pc.equal(table["verdict"], DROP))["id"]


def edited(table: pa.Table) -> int:
    """Return the number of documents that were edited and not dropped later."""
    ids = table.filter(pc.equal(table["verdict"], EDIT))["id"].unique()
    return int(pc.sum(pc.invert(pc.is_in(ids, value_set=dropped_ids(table).combine_chunks()))).as_py() or 0)


def encode(table: pa.Table) -> bytes:
    """Return a table as Parquet; equal rows give equal bytes."""
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", row_group_size=1 << 20)
    return sink.getvalue()


def decode(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table that `encode` wrote."""
    return pq.read_table(io.BytesIO(data), columns=list(columns) if columns is not None else None)


def without(table: pa.Table, dropped: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Table:
    """Return the rows of `table` whose `id` is in none of the columns `dropped`."""
    dropped_columns = [column for column in dropped if len(column)]
    if not dropped_columns or not table.num_rows:
        return table
    values = pa.chunked_array([chunk for column in dropped_columns for chunk in _chunks(column)], pa.string())
    return table.filter(pc.invert(pc.is_in(table["id"], value_set=values.combine_chunks())))


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def counts(table: pa.Table, verdict: str = DROP) -> dict[str, int]:
    """Return the number of rows of one verdict, by reason."""
    groups = table.filter(pc.equal(table["verdict"], verdict)).group_by("reason").aggregate([([], "count_all")])
    return dict(sorted(zip(groups["reason"].to_pylist(), groups["count_all"].to_pylist(), strict=True)))


def sampled(table: pa.Table) -> np.ndarray:
    """Return the rows that `samples` shows, int64: for each reason those with the lowest id hashes.

    The samples of a table are among the samples of its pieces.
    """
    hashes = hash_ids(table["id"])
    reasons = table["reason"].combine_chunks().dictionary_encode()
    codes = reasons.indices.to_numpy(zero_copy_only=False)
    parts = [np.zeros(0, np.int64)]
    for code in np.argsort(np.array(reasons.dictionary.to_pylist(), dtype=object)).tolist():
        rows = np.flatnonzero(codes == code)
        parts.append(rows[np.argsort(hashes[rows], kind="stable")[:SAMPLES]])
    return np.concatenate(parts)


def samples(table: pa.Table, documents: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Return a few documents for each reason: those with the lowest id hashes, so any split of work gives the same.

    Args:
        table: verdicts.
        documents: columns id and text (or head) of at least the `sampled` documents. If there is a column `reason`, a
            row is for that reason alone, and the column `after` may have the edited text.
    """
    names = documents.column_names
    reasons = documents["reason"].to_pylist() if "reason" in names else [""] * len(documents)
    indices = {key: index for index, key in enumerate(zip(documents["id"].to_pylist(), reasons, strict=True))}
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for row in sampled(table).tolist():
        reason = table["reason"][row].as_py()
        index = indices.get((table["id"][row].as_py(), reason if "reason" in names else ""))
        by_reason.setdefault(reason, []).append(_sample(table, row, documents, index))
    return by_reason


def _sample(table: pa.Table, row: int, documents: pa.Table, index: int | None) -> dict[str, Any]:
    identity = table["id"][row].as_py()
    texts = documents["text" if "text" in documents.column_names else "head"]
    sample: dict[str, Any] = {"id": identity, "order": int(hash_ids([identity])[0]),
                              "text": "" if index is None else head(texts[index].as_py())}
    if index is not None and "after" in documents.column_names and documents["after"][index].is_valid:
        sample["after"] = documents["after"][index].as_py()
    for name in ("survivor", "score", "detail"):
        value = table[name][row].as_py()
        if value not in (None, ""):
            sample[name] = round(value, 6) if isinstance(value, float) else value
    return sample


def head(text: str) -> str:
    """Return the first characters of a text, as samples show them."""
    return text[:SAMPLE_CHARACTERS]


def change(before: str, after: str) -> tuple[str, str]:
    """Return both texts of an edit from a little before the first difference, as samples show them."""
    length = min(len(before), len(after))
    same = next((index for index in range(length) if before[index] != after[index]), length)
    start = max(same - _CONTEXT, 0)
    return head(before[start:]), head(after[start:])


def merge_samples(parts: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of a stage from those of its units, without the sort key."""
    pooled: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for reason, rows in part.items():
            pooled.setdefault(reason, []).extend(rows)
    return {reason: [{name: value for name, value in row.items() if name != "order"}
                     for row in sorted(rows, key=lambda row: (row["order"], row["id"]))[:SAMPLES]]
            for reason, rows in sorted(pooled.items())}


def hash_ids(ids: pa.Array | pa.ChunkedArray | Sequence[str], seed: int = 0) -> np.ndarray:
    """Return XXH3-64 of each id, uint64 [n]. It decides partitions, samples and the validation split."""
    values = ids.to_pylist() if isinstance(ids, pa.Array | pa.ChunkedArray) else ids
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(value.encode(), seed) for value in values), np.uint64, len(values))


def partition_of(hashes: np.ndarray, partitions: int) -> np.ndarray:
    """Return the partition of each id hash, int32 [n]. Partitions are ranges of the hash, in order."""
    return ((hashes >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int32)
