"""Writers for the formats of a product. Equal rows give equal bytes.

MDS follows version 2 of mosaicml-streaming; `.bin` and `.idx` follow version 1 of Megatron-LM's indexed data set. A
writer needs a sink with the method `write`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidewheel.data.product.rows import SCHEMA, Batch
from tidewheel.data.readers.record import CANONICAL

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT_FORMATS = ("parquet", "jsonl", "arrow", "mds")
FOLDERS = {"parquet": "data", "jsonl": "jsonl", "arrow": "arrow", "mds": "mds", "megatron": "megatron"}
SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl.zst", "arrow": ".arrow", "mds": ".mds", "megatron": ".bin"}
_LEVEL = 3
MDS_COLUMNS = tuple(sorted(SCHEMA.names))
MDS_SIZE_LIMIT = 1 << 26
MEGATRON_UINT16_BELOW = 65_500
"""Vocabularies with fewer tokens are stored as uint16, others as int32, as in Megatron-LM's `DType.optimal_dtype`."""


class FileWriter(Protocol):
    """Writer of one file."""

    def add(self, batch: Batch) -> None:
        """Write a batch of documents, or keep it until `close`."""

    def close(self) -> None:
        """Write the rest of the file."""


def open_writer(format: str, sink: Any, token_dtype: str = "") -> FileWriter:
    """Return a writer.

    Args:
        format: name of the format.
        sink: object with the method `write`.
        token_dtype: `megatron_dtype` of the vocabulary, for the format megatron.
    """
    if format == "megatron":
        return MegatronWriter(sink, token_dtype)
    writers: dict[str, Callable[[Any], FileWriter]] = {
        "parquet": ParquetFile, "jsonl": JsonlFile, "arrow": ArrowFile, "mds": MdsShard}
    return writers[format](sink)


class JsonlFile:
    """JSON lines, compressed with zstd: id, text, source, url, language and license if known, metadata."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._compressor = zstd.ZstdCompressor(level=_LEVEL)

    def add(self, batch: Batch) -> None:
        """Write a line for each document."""
        rows = batch.table.drop_columns(["metadata"]).to_pylist()
        lines = []
        for row, metadata in zip(rows, batch.metadata, strict=True):
            known = {name: value for name, value in row.items() if name not in CANONICAL or value is not None}
            lines.append(json.dumps({**known, "metadata": metadata}, ensure_ascii=False) + "\n")
        self._sink.write(self._compressor.compress("".join(lines).encode()))

    def close(self) -> None:
        """Write the end of the compressed stream."""
        self._sink.write(self._compressor.flush())


class ParquetFile:
    """Parquet with zstd, page checksums, and a row group for each batch."""

    def __init__(self, sink: Any) -> None:
        self._file = pq.ParquetWriter(sink, SCHEMA, compression="zstd", compression_level=_LEVEL,
                                      use_dictionary=["source", "language", "license"], write_statistics=["id"],
                                      write_page_checksum=True)

    def add(self, batch: Batch) -> None:
        """Write a row group."""
        self._file.write_table(batch.table, row_group_size=len(batch.table))

    def close(self) -> None:
        """Write the footer."""
        self._file.close()


class ArrowFile:
    """Arrow IPC file with a record batch for each batch, and buffers compressed with zstd."""

    def __init__(self, sink: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", _LEVEL))
        self._file = pa.ipc.new_file(sink, SCHEMA, options=options)

    def add(self, batch: Batch) -> None:
        """Write a record batch."""
        self._file.write_table(batch.table)

    def close(self) -> None:
        """Write the footer."""
        self._file.close()


class MdsShard:
    """MDS shard.

    It contains the number n of samples (uint32), n + 1 offsets from the beginning of the file (uint32), the shard's
    settings as JSON, and the samples. A sample has the sizes of its columns (uint32), then their values, in the order
    of the columns' names.
    """

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._samples: list[bytes] = []

    def add(self, batch: Batch) -> None:
        """Keep a sample for each document until `close`."""
        columns = [batch.table[name].to_pylist() for name in MDS_COLUMNS]
        for values in zip(*columns, strict=True):
            data = [(value or "").encode() for value in values]
            self._samples.append(np.array(list(map(len, data)), "<u4").tobytes() + b"".join(data))

    def close(self) -> None:
        """Write the shard.

        Raises:
            ValueError: it is too large for MDS.
        """
        settings = json.dumps(mds_settings(), sort_keys=True).encode()
        count = len(self._samples)
        sizes = np.array([0, *map(len, self._samples)], np.int64)
        offsets = sizes.cumsum() + 4 + 4 * (count + 1) + len(settings)
        if offsets[-1] >= 1 << 32:
            raise ValueError(f"an MDS shard of {offsets[-1]} bytes; the maximum is 4 GiB")
        self._sink.write(struct.pack("<I", count) + offsets.astype("<u4").tobytes() + settings)
        for sample in self._samples:
            self._sink.write(sample)
        self._samples = []


def mds_settings() -> dict[str, Any]:
    """Return the settings of a shard that its header and the index contain."""
    return {"version": 2, "format": "mds", "compression": None, "hashes": ["sha256"], "size_limit": MDS_SIZE_LIMIT,
            "column_names": list(MDS_COLUMNS), "column_encodings": ["str"] * len(MDS_COLUMNS),
            "column_sizes": [None] * len(MDS_COLUMNS)}


def mds_index(shards: list[dict[str, Any]]) -> bytes:
    """Return `index.json` of a folder of shards, each {"name", "rows", "bytes", "sha256"}."""
    entries = [{**mds_settings(), "samples": shard["rows"], "zip_data": None, "raw_data": {
        "basename": shard["name"], "bytes": shard["bytes"], "hashes": {"sha256": shard["sha256"]}}} for shard in shards]
    return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


class MegatronWriter:
    """Writer of the tokens of documents, one after another (`.bin`); `index` returns its `.idx`."""

    def __init__(self, sink: Any, token_dtype: str) -> None:
        self._sink = sink
        self._dtype = token_dtype
        self._sizes = [np.zeros(0, np.int64)]

    def add(self, batch: Batch) -> None:
        """Write the tokens of a batch, which must have tokens."""
        assert batch.tokens is not None, "documents without tokens"
        assert batch.sizes is not None, "documents without tokens"
        self._sink.write(batch.tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        self._sizes.append(batch.sizes)

    def close(self) -> None:
        """Do nothing: the index is a separate file."""

    def index(self) -> bytes:
        """Return the index.

        It contains the magic, the version, the code of the token type, the number of sequences and the number of
        documents plus one; then the tokens of each sequence (int32), its offset in bytes (int64), and the number of
        the first sequence of each document, and one after the last (int64). Here each document is one sequence.
        """
        sizes = np.concatenate(self._sizes)
        offsets = (np.cumsum(sizes) - sizes) * np.dtype(self._dtype).itemsize
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, _MEGATRON_CODES[self._dtype], len(sizes), len(sizes) + 1)
        return b"".join([head, sizes.astype("<i4").tobytes(), offsets.astype("<i8").tobytes(),
                         np.arange(len(sizes) + 1, dtype="<i8").tobytes()])


_MEGATRON_CODES = {"int32": 4, "uint16": 8}


def megatron_dtype(vocabulary: int) -> str:
    """Return the token type that Megatron-LM expects for a vocabulary of this size."""
    return "uint16" if vocabulary < MEGATRON_UINT16_BELOW else "int32"
