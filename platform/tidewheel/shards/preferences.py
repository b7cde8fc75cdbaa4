"""Preference sets: shard sets whose rows are pairs, a better and a worse answer to one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.format import preference_schema, stored_batch
from tidewheel.shards.manifest import PREFERENCES, REBUILD, Manifest, ShardInfo, read_manifest

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
    lengths = [pc.list_value_length(batch.column(name)).to_numpy() for name in ("chosen", "rejected")]
    if batch.num_rows != info.rows:
        problems.append(f"{batch.num_rows} rows, the manifest says {info.rows}")
    tokens = int(sum(column.sum(dtype=np.int64) for column in lengths))
    if tokens != info.tokens:
        problems.append(f"{tokens} tokens, the manifest says {info.tokens}")
    longest = int(np.maximum(*lengths).max())
    shortest = (np.maximum if manifest.unpaired else np.minimum)(*lengths)
    if longest > manifest.sequence_length:
        problems.append(f"a sequence has {longest} tokens, at most {manifest.sequence_length} are allowed")
    if manifest.margins and not np.isfinite(batch.column("margin").to_numpy()).all():
        problems.append("a margin is not a number")
    prompts = batch.column("prompt_length").to_numpy()
    if manifest.unpaired and np.any(np.minimum(*lengths) != prompts):
        return [*problems, "a row of an unpaired set has two answers"]
    if manifest.step_labels:
        labels = batch.column("step_labels")
        if np.any(np.diff(labels.offsets.to_numpy()) != lengths[0] - prompts) \
                or not np.isin(labels.values.to_numpy(), (-1, 0, 1)).all():
            problems.append("an answer has not one label, -1, 0 or 1, for each token")
    if prompts.min() < 0 or np.any(prompts >= shortest):
        return [*problems, "a prompt is not shorter than its sequence"]
    flat = [batch.column(name).values.to_numpy() for name in ("chosen", "rejected")]
    if max(int(column.max(initial=0)) for column in flat) >= manifest.vocabulary_size:
        problems.append(f"a token is outside the vocabulary of {manifest.vocabulary_size}")
    owners = np.repeat(np.arange(len(prompts)), prompts)  # the pair of each prompt token
    inside = np.arange(len(owners)) - np.repeat(np.cumsum(prompts) - prompts, prompts)
    tokens_at = [batch.column(name).offsets.to_numpy()[:-1][owners] + inside for name in ("chosen", "rejected")]
    if np.any(flat[0][tokens_at[0]] != flat[1][tokens_at[1]]):
        problems.append("two sequences of a pair begin with different prompts")
    for row in np.flatnonzero(lengths[0] == lengths[1]).tolist():
        if batch.column("chosen")[row] == batch.column("rejected")[row]:
            problems.append(f"both answers of row {row} are equal")
    return problems


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
