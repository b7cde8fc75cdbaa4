"""The product of a pipeline: cleaned documents in the formats of other tools, with files that describe them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidewheel.data.product.formats import zstd
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Store

FOLDER, MANIFEST = "dataset", "manifest.json"
NAMING = ("parquet", "arrow", "jsonl")
"""Formats from which ids of documents can be read, best first."""


def read_manifest(folder: Store) -> dict[str, Any]:
    """Return the manifest of the product in a folder.

    Raises:
        StorageError: the manifest is missing or damaged.
    """
    try:
        value = folder.read_json(MANIFEST)
    except FileNotFoundError:
        raise StorageError("no manifest.json: the data set is incomplete", where=folder.uri,
                           fix="run the pipeline again") from None
    if not isinstance(value, dict) or not {"files", "others", "formats", "documents"} <= value.keys():
        raise StorageError("the manifest is damaged", where=folder.at(MANIFEST), fix="run the pipeline again")
    return value


def keys(folder: Store) -> list[str]:
    """Return the keys of all files of the product in a folder."""
    manifest = read_manifest(folder)
    return [MANIFEST, *manifest["others"], *(file["name"] for file in manifest["files"])]


def ids(folder: Store) -> Iterator[pa.Array]:
    """Yield the ids of the documents of the product in a folder.

    Raises:
        InputError: the product has none of the formats `NAMING`.
        StorageError: the manifest is missing or damaged.
    """
    manifest = read_manifest(folder)
    kind = next((name for name in NAMING if name in manifest["formats"]), None)
    if kind is None:
        raise InputError(f"the ids of documents are read from {', '.join(NAMING)}; this data set has "
                         f"{', '.join(manifest['formats'])}", where=folder.uri,
                         fix="add one of them to write.formats and run the pipeline again")
    for file in manifest["files"]:
        if file["format"] == kind:
            with folder.open(file["name"]) as stream:
                yield from _ids(kind, stream)


def _ids(kind: str, stream: Any) -> Iterator[pa.Array]:
    if kind == "parquet":
        for batch in pq.ParquetFile(stream).iter_batches(columns=["id"]):
            yield batch.column(0)
    elif kind == "arrow":
        file = pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=[0]))
        for index in range(file.num_record_batches):
            yield file.get_batch(index).column(0)
    else:
        for line in zstd.ZstdFile(stream):
            yield pa.array([json.loads(line)["id"]], pa.string())
