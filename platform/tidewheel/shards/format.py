"""One shard: an Arrow IPC file whose rows are packed sequences. Uncompressed, so that it can be memory-mapped."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa

from tidewheel.errors import ShardError
from tidewheel.shards.manifest import TOKEN_DTYPES, ShardInfo
from tidewheel.storage import Store, content_hash

#: Rows in a record batch: also the grain at which an object-store reader could fetch a part of a file.
BATCH_ROWS = 256


def shard_schema(sequence_length: int, token_dtype: str, loss_mask: bool = False) -> pa.Schema:
    """Columns of a shard.

    tokens: `sequence_length` values of `token_dtype`; length: how many of them are real (the rest is padding);
    segment_starts: where each document's piece starts in the row (the first is 0, increasing, all < length);
    document_ids: whose piece it is; document_offsets: at which token of that document the piece starts;
    loss_mask (optional): 1 where a token counts for the loss.
    """
    if token_dtype not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype {token_dtype!r} is none of {TOKEN_DTYPES}")
    columns = [
        pa.field("tokens", pa.list_(pa.field("item", getattr(pa, token_dtype)(), nullable=False), sequence_length),
                 nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("segment_starts", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("document_ids", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        pa.field("document_offsets", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
    ]
    if loss_mask:
        columns.append(pa.field("loss_mask", pa.list_(pa.field("item", pa.uint8(), nullable=False), sequence_length),
                                nullable=False))
    return pa.schema(columns)


def token_dtype_for(vocabulary_size: int) -> str:
    """The narrowest type that holds every id below `vocabulary_size`."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def write_shard(store: Store, table: pa.Table) -> ShardInfo:
    """Write `table` (of `shard_schema`) under a name that is its content hash; equal rows give equal bytes."""
    columns = table.schema.field("tokens").type
    expected = shard_schema(columns.list_size, str(columns.value_type), "loss_mask" in table.schema.names)
    data = encode(table.cast(expected))
    digest = content_hash(data)
    name = f"{digest.removeprefix('blake3-')[:32]}.arrow"
    stamp = store.write(name, data)
    tokens = int(np.asarray(table.column("length").to_numpy(), dtype=np.int64).sum())
    return ShardInfo(name=name, rows=table.num_rows, tokens=tokens, bytes=stamp.bytes, hash=stamp.hash)


def encode(table: pa.Table) -> memoryview:
    """The bytes of a shard file: chunking and slicing of `table` do not show in them."""
    sink = io.BytesIO()
    whole = pa.Table.from_batches([_compact(batch) for batch in table.combine_chunks().to_batches(BATCH_ROWS)],
                                  schema=table.schema)
    with pa.ipc.new_file(sink, table.schema.remove_metadata()) as writer:
        for batch in whole.to_batches(BATCH_ROWS):
            writer.write_batch(batch)
    return sink.getbuffer()


def _compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A copy whose buffers hold just its own rows: a slice would drag its parent's offsets into the file."""
    indices = pa.array(np.arange(batch.num_rows, dtype=np.int64))
    return pa.RecordBatch.from_arrays([column.take(indices) for column in batch.columns], schema=batch.schema)


def check_table(table: pa.Table, *, where: str, sequence_length: int, token_dtype: str, rows: int,
                loss_mask: bool) -> None:
    """Raise ShardError unless an opened shard has the schema and row count its manifest promises."""
    expected = shard_schema(sequence_length, token_dtype, loss_mask)
    mend = "run the pipeline again with the same output: what is damaged is written anew"
    if not table.schema.equals(expected):
        raise ShardError(f"columns are {table.schema.names} of other types than the manifest says", where=where,
                         mend=mend)
    if table.num_rows != rows:
        raise ShardError(f"{table.num_rows} rows, the manifest says {rows}", where=where, mend=mend)
