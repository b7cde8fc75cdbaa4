"""Preference sets: shard sets whose rows are pairs, a better and a worse answer to one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.format import preference_schema, stored_batch
from tidewheel.shards.manifest import PREFERENCES, REBUILD, Manifest, ShardInfo, read_manifest
from tidewheel.shards.pairs import PairShard, equal_rows, problem_of

__all__ = ["check_shard", "preference_schema", "read_pairs", "row_of"]


def read_pairs(uri: str) -> Iterator[pa.RecordBatch]:
    """Yield the shards of the preference set at `uri`, with the columns of `preference_schema`.

    Raises:
        ShardError: there is no preference set, or a shard is damaged.
    """
    set_store = storage.store(uri)
    manifest = read_manifest(set_store)
    if manifest.kind != PREFERENCES:
        raise ShardError("not a preference set: its rows are packed sequences", where=uri,
                         fix="read it with tidewheel.shards.reader.ShardSet")
    for info in manifest.shards:
        yield read_shard(set_store, info, manifest)


def read_shard(set_store: storage.Store, info: ShardInfo, manifest: Manifest) -> pa.RecordBatch:
    """Return one shard, having checked its hash and columns.

    Args:
        set_store: the set's folder.
        info: the shard.
        manifest: the set's manifest.

    Raises:
        ShardError: the shard is damaged; names the shard.
    """
    where = set_store.at(info.name)
    batch = stored_batch(set_store, info)
    if batch is None or not batch.schema.equals(preference_schema(manifest.token_dtype, manifest.margins,
                                                                  manifest.step_labels)):
        raise ShardError("the shard's columns are not those of its manifest", where=where, fix=REBUILD)
    return batch


def check_shard(set_store: storage.Store, info: ShardInfo, manifest: Manifest) -> list[str]:
    """Check a shard to the last token and return a line for each problem.

    Args:
        set_store: the set's folder.
        info: the shard.
        manifest: the set's manifest.
    """
    try:
        batch = read_shard(set_store, info, manifest)
        batch.validate(full=True)
    except ShardError as error:
        return [error.what]
    except ValueError as error:  # pyarrow's ArrowInvalid
        return [f"not a valid Arrow table ({str(error).splitlines()[0]})"]
    problems = []
    shard = PairShard.of(batch, manifest)
    if batch.num_rows != info.rows:
        problems.append(f"{batch.num_rows} rows, the manifest says {info.rows}")
    tokens = int(sum(column.sum(dtype=np.int64) for column in shard.lengths))
    if tokens != info.tokens:
        problems.append(f"{tokens} tokens, the manifest says {info.tokens}")
    if problem := problem_of(shard, manifest):
        return [*problems, problem]
    flat, bounds = zip(shard.chosen, shard.rejected)
    if max(int(column.max(initial=0)) for column in flat) >= manifest.vocabulary_size:
        problems.append(f"a token is outside the vocabulary of {manifest.vocabulary_size}")
    owners = np.repeat(np.arange(len(shard.prompts)), shard.prompts)  # the pair of each prompt token
    inside = np.arange(len(owners)) - np.repeat(np.cumsum(shard.prompts) - shard.prompts, shard.prompts)
    chosen, rejected = (column[starts[:-1][owners] + inside] for column, starts in zip(flat, bounds))
    if np.any(chosen != rejected):
        problems.append("two sequences of a pair begin with different prompts")
    return problems + [f"both answers of row {row} are equal" for row in equal_rows(shard)]


def row_of(set_store: storage.Store, manifest: Manifest, row: int, shown: int | None = None) -> dict[str, Any]:
    """Return JSON values of a row.

    Args:
        set_store: the set's folder.
        manifest: its manifest.
        row: index of the row in the whole set.
        shown: number of tokens to return of each sequence; None: all.

    Raises:
        ShardError: there is no such row, or its shard is damaged.
    """
    info, inside = manifest.place(row, set_store.uri)
    values = read_shard(set_store, info, manifest).slice(inside, 1).to_pylist()[0]
    return {"row": row, "id": f"{info.name}:{inside}", "document": values["document_id"],
            "prompt_length": values["prompt_length"], "chosen_length": len(values["chosen"]),
            "rejected_length": len(values["rejected"]), **({"margin": values["margin"]} if manifest.margins else {}),
            **({"step_labels": values["step_labels"]} if manifest.step_labels else {}),
            "chosen": values["chosen"][:shown], "rejected": values["rejected"][:shown]}
