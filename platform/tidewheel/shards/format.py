"""The format of a shard file: Arrow IPC with one uncompressed record batch, for memory mapping; named by its content.

There are three kinds: packed sequences (`shard_schema`), preference pairs (`preference_schema`) and rollouts
(`rollout_schema`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.errors import ShardError
from tidewheel.shards.manifest import REBUILD, TOKEN_DTYPES, ShardInfo, shard_name
from tidewheel.storage import Store, content_hash

OF_TOKENS = ("advantages", "values", "returns")
"""Columns of rollouts whose tokens are not all treated alike; see `rollout_schema`."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression=None, metadata_version=pa.ipc.MetadataVersion.V5)


def shard_schema(sequence_length: int, token_dtype: str, loss_mask: bool = False) -> pa.Schema:
    """Return the schema of a shard of packed sequences of L = `sequence_length` tokens.

    The columns are:
    - tokens: FixedSizeList(token_dtype, L).
    - length: int32, number of real tokens; the rest is padding.
    - segment_starts: list<int32>, the first one 0, increasing, below length.
    - document_ids: list<string>, the document of each segment.
    - document_offsets: list<int64>, the offset in tokens of each segment in its document.
    - loss_mask, optional: FixedSizeList(uint8, L), 1 for tokens that a model learns to predict, else 0.

    Args:
        sequence_length: L.
        token_dtype: "uint16" or "uint32".
        loss_mask: include the column loss_mask.

    Raises:
        ValueError: `token_dtype` is neither "uint16" nor "uint32".
    """
    fields = [
        pa.field("tokens", pa.list_(token_type(token_dtype), sequence_length)),
        pa.field("length", pa.int32()),
        pa.field("segment_starts", pa.list_(pa.int32())),
        pa.field("document_ids", pa.list_(pa.string())),
        pa.field("document_offsets", pa.list_(pa.int64())),
    ]
    if loss_mask:
        fields.append(pa.field("loss_mask", pa.list_(pa.uint8(), sequence_length)))
    return pa.schema(fields)


def preference_schema(token_dtype: str, margins: bool = False, steps: bool = False) -> pa.Schema:
    """Return the schema of a shard of a preference set, whose rows are pairs.

    The columns are:
    - document_id: string.
    - prompt_length: int32, number of tokens that both sequences begin with, including the generation prompt.
    - chosen, rejected: list<token_dtype>, the whole conversation with the better and the worse answer. Each is longer
      than the prompt and has at most the set's sequence_length tokens. In an unpaired set one of them is the prompt.
    - margin, optional: float32, by how much the chosen answer is better.
    - step_labels, optional: list<int8>, for each token of the chosen answer 1 if it ends a right step, 0 if it ends a
      wrong one, else -1.

    Args:
        token_dtype: "uint16" or "uint32".
        margins: include the column margin.
        steps: include the column step_labels.

    Raises:
        ValueError: `token_dtype` is neither "uint16" nor "uint32".
    """
    tokens = pa.list_(token_type(token_dtype))
    fields = [pa.field("document_id", pa.string()), pa.field("prompt_length", pa.int32()), pa.field("chosen", tokens),
              pa.field("rejected", tokens)]
    if margins:
        fields.append(pa.field("margin", pa.float32()))
    if steps:
        fields.append(pa.field("step_labels", pa.list_(pa.int8())))
    return pa.schema(fields)


def rollout_schema(token_dtype: str) -> pa.Schema:
    """Return the schema of a shard of rollouts: prompts with a sampled answer, for reinforcement learning.

    The columns are:
    - prompt_id: string, the prompt that a group of rollouts shares.
    - sample: int32, index of the rollout in its group.
    - prompt_length: int32, number of tokens of the prompt.
    - tokens: list<token_dtype>, the prompt and the answer, at most the set's sequence_length tokens.
    - learnt: list<uint8>, for each token of the answer 1 if the policy sampled it, 0 if an environment wrote it.
    - log_probabilities: list<float>, of each token of the answer under the policy that sampled it; 0 where not sampled.
    - versions: list<int32>, version of that policy for each token of the answer; -1 where not sampled.
    - reference: list<float>, log-probabilities under the reference model; an empty list if they are not known.
    - reward: float, the rollout's own.
    - advantage: float, what the objective multiplies with; the mean of `advantages` where tokens have their own.
    - advantages: list<float>, of each token of the answer; an empty list if the tokens of a rollout share one.
    - values: list<float>, estimate of the return from each token on, by a value head; an empty list without one.
    - returns: list<float>, what the value head learns; an empty list without one.

    Raises:
        ValueError: `token_dtype` is neither "uint16" nor "uint32".
    """
    return pa.schema([
        pa.field("prompt_id", pa.string()), pa.field("sample", pa.int32()), pa.field("prompt_length", pa.int32()),
        pa.field("tokens", pa.list_(token_type(token_dtype))), pa.field("learnt", pa.list_(pa.uint8())),
        pa.field("log_probabilities", pa.list_(pa.float32())), pa.field("versions", pa.list_(pa.int32())),
        pa.field("reference", pa.list_(pa.float32())), pa.field("reward", pa.float32()),
        pa.field("advantage", pa.float32()), *(pa.field(name, pa.list_(pa.float32())) for name in OF_TOKENS)])


def token_type(token_dtype: str) -> pa.DataType:
    """Return the Arrow type of a token.

    Raises:
        ValueError: `token_dtype` is not in `TOKEN_DTYPES`.
    """
    if token_dtype not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype must be one of {TOKEN_DTYPES}, got {token_dtype!r}")
    return pa.uint16() if token_dtype == "uint16" else pa.uint32()


def write_shard(store: Store, table: pa.Table) -> ShardInfo:
    """Write a table as one shard file. Equal tables give equal bytes.

    Args:
        store: the set's folder.
        table: at least one row, with the columns of one of the schemas above.

    Raises:
        ValueError: the columns are not those of a shard, a value is null, or there is no row.
    """
    table = _canonical(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_batch(table.to_batches()[0])
    data = memoryview(sink.getvalue())
    digest = content_hash(data)
    stamp = store.write(shard_name(digest), data)
    return ShardInfo(name=stamp.key, rows=table.num_rows, tokens=_tokens(table),
                     bytes=stamp.bytes, hash=stamp.hash)


def only_batch(source: Path | bytes, where: str) -> pa.RecordBatch | None:
    """Return the record batch of a shard file; None if it has none or several.

    Args:
        source: the file, which is memory-mapped, or its content.
        where: location for error messages.

    Raises:
        ShardError: it is not a valid Arrow file.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(source)) if isinstance(source, Path) else pa.py_buffer(source))
        batch = reader.get_batch(0) if reader.num_record_batches == 1 else None
        if batch is not None:
            batch.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardError(f"not a readable shard ({str(error).splitlines()[0]})", where=where, fix=REBUILD) from None
    return batch


def stored_batch(store: Store, info: ShardInfo) -> pa.RecordBatch | None:
    """Return the record batch of a shard in a set's folder, whose hash is checked; None if it has none or several.

    Raises:
        ShardError: the shard is damaged; names the shard.
    """
    where = store.at(info.name)
    try:
        data = store.read(info.name)
    except OSError as error:
        raise ShardError(f"not a readable shard ({str(error).splitlines()[0]})", where=where, fix=REBUILD) from None
    if content_hash(data) != info.hash:
        raise ShardError("hash differs: the content has changed", where=where, fix=REBUILD)
    return only_batch(data, where)


def _tokens(table: pa.Table) -> int:
    if "chosen" in table.column_names:
        return sum(int(pc.sum(pc.list_value_length(table[name])).as_py()) for name in ("chosen", "rejected"))
    if "prompt_id" in table.column_names:
        return int(pc.sum(pc.list_value_length(table["tokens"])).as_py())
    return int(pc.sum(table["length"]).as_py())


def _canonical(table: pa.Table) -> pa.Table:
    """Return `table` in one chunk, with fresh buffers: no slices, and no metadata or bitmaps of its producer."""
    if table.num_rows == 0:
        raise ValueError("a shard has at least one row")
    schema = _schema_of(table)
    table = table.select(schema.names).cast(schema)
    for name, column in zip(schema.names, table.columns):
        if column.null_count or (pa.types.is_nested(column.type) and pc.list_flatten(column).null_count):
            raise ValueError(f"a shard holds no nulls, column {name!r} does")
    # `take` copies into fresh buffers, so that a slice and a copy of it give the same bytes
    return table.combine_chunks().take(pa.array(np.arange(table.num_rows))).combine_chunks()


def _schema_of(table: pa.Table) -> pa.Schema:
    """Return the schema of a shard with these columns."""
    if "chosen" in table.column_names and pa.types.is_list(table.schema.field("chosen").type):
        return preference_schema(str(table.schema.field("chosen").type.value_type), "margin" in table.column_names,
                                 "step_labels" in table.column_names)
    if "prompt_id" in table.column_names and "tokens" in table.column_names \
            and pa.types.is_list(table.schema.field("tokens").type):
        return rollout_schema(str(table.schema.field("tokens").type.value_type))
    if "tokens" not in table.column_names or not pa.types.is_fixed_size_list(table.schema.field("tokens").type):
        raise ValueError(f"not a shard: columns {table.column_names}")
    tokens = table.schema.field("tokens").type
    return shard_schema(tokens.list_size, str(tokens.value_type), "loss_mask" in table.column_names)
