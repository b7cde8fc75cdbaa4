"""One writer for each format of a product. Equal rows give equal bytes.

Formats that others define are written from their definitions: MDS as mosaicml-streaming's version 2, `.bin` and `.idx`
as Megatron-LM's indexed data set of version 1. What every writer needs is a sink with `write`.
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
"""Vocabularies of fewer tokens are stored as uint16, as Megatron-LM's `DType.optimal_dtype` has it; others as int32."""


class FileWriter(Protocol):
    """Writes one file."""

    def add(self, batch: Batch) -> None: ...

    def close(self) -> None: ...


def open_writer(format: str, sink: Any, token_dtype: str = "") -> FileWriter:
    """The writer of a format; `token_dtype` is what `megatron_dtype` says."""
    if format == "megatron":
        return MegatronWriter(sink, token_dtype)
    writers: dict[str, Callable[[Any], FileWriter]] = {
        "parquet": ParquetFile, "jsonl": JsonlFile, "arrow": ArrowFile, "mds": MdsShard}
    return writers[format](sink)


class JsonlFile:
    """JSON lines, compressed with zstd: id, text, source, url, language and license where known, metadata."""

    def __init__(self, sink: Any) -> None:
        self._sink, self._packer = sink, zstd.ZstdCompressor(level=_LEVEL)

    def add(self, batch: Batch) -> None:
        rows = batch.table.drop_columns(["metadata"]).to_pylist()
        lines = []
        for row, metadata in zip(rows, batch.metadata, strict=True):
            known = {name: value for name, value in row.items() if name not in CANONICAL or value is not None}
            lines.append(json.dumps({**known, "metadata": metadata}, ensure_ascii=False) + "\n")
        self._sink.write(self._packer.compress("".join(lines).encode()))

    def close(self) -> None:
        self._sink.write(self._packer.flush())


class ParquetFile:
    """Parquet with zstd, checksums of pages, and a row group for each batch."""

    def __init__(self, sink: Any) -> None:
        self._file = pq.ParquetWriter(sink, SCHEMA, compression="zstd", compression_level=_LEVEL,
                                      use_dictionary=["source", "language", "license"], write_statistics=["id"],
                                      write_page_checksum=True)

    def add(self, batch: Batch) -> None:
        self._file.write_table(batch.table, row_group_size=len(batch.table))

    def close(self) -> None:
        self._file.close()


class ArrowFile:
    """An Arrow IPC file, a record batch for each batch, buffers compressed with zstd."""

    def __init__(self, sink: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", _LEVEL))
        self._file = pa.ipc.new_file(sink, SCHEMA, options=options)

    def add(self, batch: Batch) -> None:
        self._file.write_table(batch.table)

    def close(self) -> None:
        self._file.close()


class MdsShard:
    """A shard of MDS: uint32 number of samples; uint32 offsets, one more than samples, from the beginning of the file;
    the shard's settings as JSON; the samples. A sample is the uint32 sizes of its columns, then their values, columns
    by name."""

    def __init__(self, sink: Any) -> None:
        self._sink, self._samples = sink, list[bytes]()

    def add(self, batch: Batch) -> None:
        columns = [batch.table[name].to_pylist() for name in MDS_COLUMNS]
        for values in zip(*columns, strict=True):
            data = [(value or "").encode() for value in values]
            self._samples.append(np.array(list(map(len, data)), "<u4").tobytes() + b"".join(data))

    def close(self) -> None:
        settings = json.dumps(mds_settings(), sort_keys=True).encode()
        count = len(self._samples)
        sizes = np.array([0, *map(len, self._samples)], np.int64)
        offsets = sizes.cumsum() + 4 + 4 * (count + 1) + len(settings)
        if offsets[-1] >= 1 << 32:
            raise ValueError(f"a shard of {offsets[-1]} bytes; MDS holds less than 4 GiB in one")
        self._sink.write(struct.pack("<I", count) + offsets.astype("<u4").tobytes() + settings)
        for sample in self._samples:
            self._sink.write(sample)
        self._samples = []


def mds_settings() -> dict[str, Any]:
    """What a shard and the index say about how samples are written."""
    return {"version": 2, "format": "mds", "compression": None, "hashes": ["sha256"], "size_limit": MDS_SIZE_LIMIT,
            "column_names": list(MDS_COLUMNS), "column_encodings": ["str"] * len(MDS_COLUMNS),
            "column_sizes": [None] * len(MDS_COLUMNS)}


def mds_index(shards: list[dict[str, Any]]) -> bytes:
    """`index.json` of a folder of shards, each {"name", "rows", "bytes", "sha256"}."""
    entries = [{**mds_settings(), "samples": shard["rows"], "zip_data": None, "raw_data": {
        "basename": shard["name"], "bytes": shard["bytes"], "hashes": {"sha256": shard["sha256"]}}} for shard in shards]
    return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


class MegatronWriter:
    """The tokens of documents, one behind the other (`.bin`); `index` gives the `.idx` that belongs to it."""

    def __init__(self, sink: Any, token_dtype: str) -> None:
        self._sink, self._dtype = sink, token_dtype
        self._sizes = [np.zeros(0, np.int64)]

    def add(self, batch: Batch) -> None:
        assert batch.tokens is not None, "documents without tokens"
        assert batch.sizes is not None, "documents without tokens"
        self._sink.write(batch.tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        self._sizes.append(batch.sizes)

    def close(self) -> None:
        """Nothing is left to write: the index is a file of its own."""

    def index(self) -> bytes:
        """Magic, version, code of the token type, sequences, documents and one; then int32 tokens of each sequence,
        int64 offsets in bytes, int64 number of the first sequence of each document and behind the last. A document is a
        sequence here."""
        sizes = np.concatenate(self._sizes)
        offsets = (np.cumsum(sizes) - sizes) * np.dtype(self._dtype).itemsize
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, _MEGATRON_CODES[self._dtype], len(sizes), len(sizes) + 1)
        return b"".join([head, sizes.astype("<i4").tobytes(), offsets.astype("<i8").tobytes(),
                         np.arange(len(sizes) + 1, dtype="<i8").tobytes()])


_MEGATRON_CODES = {"int32": 4, "uint16": 8}


def megatron_dtype(vocabulary: int) -> str:
    """The type of tokens that Megatron-LM takes for a vocabulary of this size."""
    return "uint16" if vocabulary < MEGATRON_UINT16_BELOW else "int32"
