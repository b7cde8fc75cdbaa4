"""A small shard set whose every token says where it belongs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest

LENGTH = 12


def table(rows: int, first: int = 0, *, loss_mask: bool = False, dtype: str = "uint16") -> pa.Table:
    """`rows` rows; row r has tokens 2 + (first + r) % 100, then pad 1; one, two or three segments."""
    values = []
    for row in range(first, first + rows):
        length = LENGTH - row % 4
        starts = [0, 3, 7][: 1 + row % 3]
        values.append({"tokens": [2 + row % 100] * length + [1] * (LENGTH - length), "length": length,
                       "segment_starts": starts, "document_ids": [f"d{row}-{s}" for s in starts],
                       "document_offsets": [10 * s for s in starts],
                       **({"loss_mask": [row % 2] * LENGTH} if loss_mask else {})})
    return pa.Table.from_pylist(values, schema=shard_schema(LENGTH, dtype, loss_mask))


def write_set(uri: str | Path, rows: tuple[int, ...] = (5, 9, 1), **changes: Any) -> Manifest:
    """A set with shards of `rows` rows."""
    folder_store = storage.store(uri)
    mask = bool(changes.get("loss_mask"))
    starts = np.cumsum([0, *rows]).tolist()
    shards = tuple(write_shard(folder_store, table(count, first, loss_mask=mask)) for count, first in zip(rows, starts))
    stamp = folder_store.write("tokenizer.json", b"{}")
    fields: dict[str, Any] = {
        "sequence_length": LENGTH, "token_dtype": "uint16", "vocabulary_size": 128,
        "tokenizer": {"file": "tokenizer.json", "hash": stamp.hash, "eos": 0, "pad": 1}, "recipe_hash": "abc",
        "evaluation_sets": ({"name": "e", "hash": "h", "items": 3},), "documents": 20, "shards": shards, **changes}
    manifest = Manifest(**fields)
    write_manifest(folder_store, manifest)
    return manifest
