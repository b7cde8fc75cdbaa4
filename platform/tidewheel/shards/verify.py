"""Verify a shard set against its manifest, to the last token, and describe what is in it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards import preferences, rollouts
from tidewheel.shards.manifest import PACKED, ROLLOUTS, Manifest, ShardInfo, read_manifest
from tidewheel.shards.reader import Shard, ShardSet

SHOWN = 20
"""Number of shards that `inspect` lists."""


def verify(uri: str) -> list[str]:
    """Read the whole set and return a line for each problem, [] if it is intact.

    This checks hashes, lengths, rows, columns, segments, padding, loss masks, pairs, rollouts, and that every token is
    in the vocabulary.

    Raises:
        ShardError: there is no set, or its manifest is damaged.
    """
    store = storage.store(uri)
    manifest = read_manifest(store)
    tokenizer = manifest.tokenizer
    problems = []
    if not store.exists(tokenizer["file"]):
        problems.append(f"{tokenizer['file']}: missing")
    elif store.hash(tokenizer["file"]) != tokenizer["hash"]:
        problems.append(f"{tokenizer['file']}: hash differs: the content has changed")
    shard_set = ShardSet.open(uri) if manifest.kind == PACKED else None
    for index, info in enumerate(manifest.shards):
        differs = store.verify(storage.Stamp(info.name, info.bytes, info.hash))
        if differs:
            in_shard = [differs]
        elif shard_set is None:
            kind = rollouts if manifest.kind == ROLLOUTS else preferences
            in_shard = kind.check_shard(store, info, manifest)
        else:
            in_shard = _contents(shard_set, index, info)
        problems += [f"{info.name}: {problem}" for problem in in_shard]
    return problems


def _contents(shard_set: ShardSet, index: int, info: ShardInfo) -> list[str]:
    try:
        shard = shard_set.shard(index)
        shard.batch.validate(full=True)
    except ShardError as error:
        return [error.what]
    except ValueError as error:  # pyarrow's ArrowInvalid
        return [f"not a valid Arrow table ({str(error).splitlines()[0]})"]
    return [*_lengths(shard, info, shard_set.manifest), *_segments(shard)]


def _lengths(shard: Shard, info: ShardInfo, manifest: Manifest) -> list[str]:
    length = manifest.sequence_length
    problems = []
    if shard.lengths.min() < 1 or shard.lengths.max() > length:
        return [f"a row has {shard.lengths.min()} or {shard.lengths.max()} tokens, allowed are 1 to {length}"]
    if int(shard.lengths.sum(dtype=np.int64)) != info.tokens:
        problems.append(f"{shard.lengths.sum(dtype=np.int64)} tokens, the manifest says {info.tokens}")
    if int(shard.tokens.max()) >= manifest.vocabulary_size:
        problems.append(f"token {shard.tokens.max()} is outside the vocabulary of {manifest.vocabulary_size}")
    padding = np.arange(length) >= shard.lengths[:, None]
    if np.any(shard.tokens[padding] != manifest.tokenizer["pad"]):
        problems.append(f"something other than the pad token {manifest.tokenizer['pad']} after the end of a row")
    if shard.loss_mask is not None and (shard.loss_mask.max() > 1 or np.any(shard.loss_mask[padding])):
        problems.append("a loss mask has values other than 0 and 1, or marks padding")
    return problems


def _segments(shard: Shard) -> list[str]:
    counts = np.diff(shard.segment_bounds)
    if np.any(counts < 1):
        return [f"row {int(np.argmax(counts < 1))} has no segment"]
    for name in ("document_ids", "document_offsets"):
        lengths = pc.list_value_length(shard.batch.column(name)).to_numpy(zero_copy_only=False)
        if np.any(lengths != counts):
            return [f"row {int(np.argmax(lengths != counts))}: {name} and segment_starts differ in number"]
    starts, owner = shard.segment_starts, np.repeat(np.arange(len(counts)), counts)
    first = np.zeros(len(starts), dtype=bool)
    first[shard.segment_bounds[:-1]] = True
    wrong = np.where(first, starts != 0, starts <= np.roll(starts, 1)) | (starts >= shard.lengths[owner])
    if np.any(wrong):
        return [f"row {int(owner[np.argmax(wrong)])}: segments do not begin at 0, rise and end inside the row"]
    if pc.min(pc.list_flatten(shard.batch.column("document_offsets"))).as_py() < 0:
        return ["a document offset is negative"]
    return []


def inspect(uri: str, row: int | None = None) -> dict[str, Any]:
    """Return JSON values that describe the set, or one row with its segments and documents.

    Args:
        uri: the set.
        row: index of the row in the whole set; None: describe the set.

    Raises:
        ShardError: there is no set, it is damaged, or it has no such row.
    """
    store = storage.store(uri)
    manifest = read_manifest(store)
    if manifest.kind == PACKED:
        look = partial(_row, ShardSet.open(uri))
    else:
        kind = rollouts if manifest.kind == ROLLOUTS else preferences
        look = partial(kind.row_of, store, manifest)
    if row is not None:
        return look(row)
    summary = manifest.canonical()
    return {
        **summary, "uri": store.uri, "hash": manifest.hash, "rows": manifest.rows, "tokens": manifest.tokens,
        "utilisation": round(manifest.utilisation, 6), "bytes": sum(shard.bytes for shard in manifest.shards),
        "num_shards": len(manifest.shards), "shards": summary["shards"][:SHOWN],
        "first_rows": [look(number, shown=16) for number in range(min(3, manifest.rows))]}


def _row(shard_set: ShardSet, row: int, shown: int | None = None) -> dict[str, Any]:
    manifest = shard_set.manifest
    if not 0 <= row < manifest.rows:
        raise ShardError(f"there is no row {row}", where=shard_set.store.uri,
                         fix=f"rows of this set are numbered from 0 to {manifest.rows - 1}")
    ends = np.cumsum([shard.rows for shard in manifest.shards])
    index = int(np.searchsorted(ends, row, side="right"))
    inside = row - int(ends[index]) + manifest.shards[index].rows
    values = shard_set.shard(index).batch.slice(inside, 1).to_pylist()[0]
    starts, length = values["segment_starts"], values["length"]
    segments = [{"start": start, "tokens": end - start, "document": document, "document_offset": offset}
                for start, end, document, offset in zip(starts, [*starts[1:], length], values["document_ids"],
                                                        values["document_offsets"])]
    return {"row": row, "id": f"{manifest.shards[index].name}:{inside}", "length": length, "segments": segments,
            **({"loss_tokens": sum(values["loss_mask"])} if manifest.loss_mask else {}),
            "tokens": values["tokens"][:shown]}
