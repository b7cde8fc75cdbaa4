"""Rows of a product: documents with well-known fields as columns, in batches that depend only on the documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.document import encode_meta
from tidewheel.data.readers.record import CANONICAL

SCHEMA = pa.schema([
    pa.field("id", pa.string(), nullable=False), pa.field("text", pa.large_string(), nullable=False),
    pa.field("source", pa.string(), nullable=False), *(pa.field(name, pa.string()) for name in CANONICAL),
    pa.field("metadata", pa.string(), nullable=False),  # JSON object: other fields, and the position of the record
])
BATCH_BYTES = 16 << 20
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Batch:
    """Some documents.

    Args:
        table: rows of `SCHEMA`.
        metadata: the column `metadata`, parsed.
        tokens: tokens of all documents, one after another; None without a tokenizer.
        sizes: number of tokens of each document; None without a tokenizer.
    """

    table: pa.Table
    metadata: list[Mapping[str, Any]]
    tokens: np.ndarray | None = None
    sizes: np.ndarray | None = None

    @property
    def text_bytes(self) -> int:
        """Total bytes of text."""
        return int(pc.sum(pc.binary_length(self.table["text"])).as_py() or 0)


def batches(documents: Iterable[pa.Table], max_bytes: int = BATCH_BYTES) -> Iterator[pa.Table]:
    """Yield documents (`DOCUMENT_SCHEMA`) in batches that do not depend on the boundaries of the given tables."""
    max_bytes = min(max_bytes, BATCH_BYTES)
    left: list[pa.Table] = []
    rows = 0
    size = 0
    for table in documents:
        sizes = pc.add(pc.binary_length(table["text"]), pc.binary_length(table["meta"])).to_numpy()
        begin = 0
        for row, row_bytes in enumerate(sizes.tolist()):
            rows += 1
            size += row_bytes
            if rows >= BATCH_ROWS or size >= max_bytes:
                yield pa.concat_tables([*left, table.slice(begin, row + 1 - begin)])
                left = []
                rows = 0
                size = 0
                begin = row + 1
        if begin < len(table):
            left.append(table.slice(begin))
    if left:
        yield pa.concat_tables(left)


def batch_of(documents: pa.Table) -> Batch:
    """Return documents (`DOCUMENT_SCHEMA`) as rows of a product."""
    metas = [json.loads(meta) for meta in documents["meta"].to_pylist()]
    named = {name: [_string(meta.pop(name, None)) for meta in metas] for name in CANONICAL}
    metadata = [encode_meta(meta, ensure_ascii=False) for meta in metas]
    columns = {"id": documents["id"], "text": documents["text"], "source": documents["source"], **named,
               "metadata": metadata}
    arrays = [values if isinstance(values, pa.ChunkedArray) else pa.array(values, SCHEMA.field(name).type)
              for name, values in columns.items()]
    return Batch(pa.Table.from_arrays(arrays, schema=SCHEMA).combine_chunks(), metas)


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
