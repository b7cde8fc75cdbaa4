"""Checking and describing a shard set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.errors import ShardError
from tidewheel.shards.manifest import Manifest, ShardInfo, read_manifest
from tidewheel.shards.reader import ShardSet
from tidewheel.storage import Stamp, Store, store

SHOWN_SHARDS = 20
SHOWN_TOKENS = 32


def verify(uri: str) -> list[str]:
    """Everything wrong with the set at `uri`, [] when it is intact: file lengths and hashes, schema, row and token
    counts, segment invariants, token ids below the vocabulary size, the tokenizer file.

    Raises:
        ShardError: there is no manifest, or it cannot be read.
    """
    place = store(uri)
    manifest = read_manifest(place)
    shard_set = ShardSet.open(uri)
    problems: list[str] = []
    for index, shard in enumerate(manifest.shards):
        wrong = place.verify(Stamp(shard.name, shard.bytes, shard.hash))
        if wrong:
            problems.append(f"{shard.name}: {wrong}")
            continue
        try:
            problems += [f"{shard.name}: {each}" for each in check_rows(shard_set.table(index), manifest, shard)]
        except ShardError as error:
            problems.append(f"{shard.name}: {error.what}")
    return problems + [f"tokenizer: {wrong}" for wrong in _check_tokenizer(place, manifest)]


def _check_tokenizer(place: Store, manifest: Manifest) -> list[str]:
    key, expected = manifest.tokenizer.get("file"), manifest.tokenizer.get("hash")
    if not key:
        return []
    if not place.exists(key):
        return [f"{key} is missing"]
    return [f"{key} is not the one that made the set (hash differs)"] if place.hash(key) != expected else []


def check_rows(table: pa.Table, manifest: Manifest, shard: ShardInfo) -> list[str]:
    """What is wrong with the rows of one shard; [] when nothing is."""
    problems = []
    length = manifest.sequence_length
    lengths = table.column("length").to_numpy()
    if lengths.size and (lengths.min() < 1 or lengths.max() > length):
        problems.append(f"row lengths reach from {lengths.min()} to {lengths.max()}, allowed are 1 to {length}")
    if int(lengths.sum()) != shard.tokens:
        problems.append(f"{int(lengths.sum())} tokens, the manifest says {shard.tokens}")
    tokens = table.column("tokens").combine_chunks().flatten().to_numpy()
    if tokens.size and int(tokens.max()) >= manifest.vocabulary_size:
        problems.append(f"token id {int(tokens.max())} is not below the vocabulary size {manifest.vocabulary_size}")
    return problems + _check_segments(table, lengths)


def _check_segments(table: pa.Table, lengths: np.ndarray) -> list[str]:
    starts, offsets = _lists(table, "segment_starts")
    for name in ("document_ids", "document_offsets"):
        if not np.array_equal(_lists(table, name)[1], offsets):
            return [f"{name} and segment_starts differ in length"]
    counts = np.diff(offsets)
    if counts.size and counts.min() < 1:
        return ["a row has no segment"]
    row_of = np.repeat(np.arange(counts.size), counts)
    first = np.zeros(starts.size, dtype=bool)
    first[offsets[:-1]] = True
    rising = np.ones(starts.size, dtype=bool)
    rising[1:] = starts[1:] > starts[:-1]
    wrong = (first & (starts != 0)) | (~first & ~rising) | (starts >= lengths[row_of])
    rows = np.unique(row_of[wrong])
    return [f"segments of row {rows[0]} (and {rows.size - 1} more) do not rise from 0 below its length"] \
        if rows.size else []


def _lists(table: pa.Table, name: str) -> tuple[Any, np.ndarray]:
    """Values (numpy where they are numbers) and offsets of a list column."""
    column = table.column(name).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    values = column.flatten()
    offsets = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy())]).astype(np.int64)
    return (values.to_numpy() if not pa.types.is_string(values.type) else values), offsets


def inspect(uri: str, row: int | None = None) -> dict[str, Any]:
    """Totals and shards of the set at `uri` as JSON values; with `row` (counted through the set), that row.

    Raises:
        ShardError: no set, or no such row.
    """
    manifest = read_manifest(store(uri))
    if row is not None:
        return _inspect_row(ShardSet.open(uri), row)
    return {
        "uri": uri, "hash": manifest.hash, "rows": manifest.rows, "tokens": manifest.tokens,
        "documents": manifest.documents, "sequence_length": manifest.sequence_length,
        "utilisation": round(manifest.utilisation, 6), "token_dtype": manifest.token_dtype,
        "vocabulary_size": manifest.vocabulary_size, "tokenizer": manifest.tokenizer,
        "recipe_hash": manifest.recipe_hash, "evaluation_sets": list(manifest.evaluation_sets),
        "num_shards": len(manifest.shards), "shards": [vars(shard) for shard in manifest.shards[:SHOWN_SHARDS]],
    }


def _inspect_row(shard_set: ShardSet, row: int) -> dict[str, Any]:
    manifest = shard_set.manifest
    starts = np.cumsum([0, *(shard.rows for shard in manifest.shards)])
    if not 0 <= row < starts[-1]:
        raise ShardError(f"there is no row {row}", where="shards inspect", mend=f"rows are 0 to {int(starts[-1]) - 1}")
    shard = int(np.searchsorted(starts, row, side="right")) - 1
    found = shard_set.table(shard).slice(row - int(starts[shard]), 1).to_pylist()[0]
    ends = [*found["segment_starts"][1:], found["length"]]
    return {
        "id": f"{manifest.shards[shard].name}:{row - int(starts[shard])}", "length": found["length"],
        "segments": [
            {"document": document, "document_offset": offset, "start": start, "end": end,
             "tokens": found["tokens"][start:min(end, start + SHOWN_TOKENS)]}
            for document, offset, start, end in zip(found["document_ids"], found["document_offsets"],
                                                    found["segment_starts"], ends)
        ],
    }
