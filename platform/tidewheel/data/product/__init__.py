"""Cleaned documents as a product: files in the formats that other tools read, and the pages that describe them."""

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
"""Formats that ids of documents are read from, the best first."""


def read_manifest(place: Store) -> dict[str, Any]:
    """The manifest of the product at `place`.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    try:
        value = place.read_json(MANIFEST)
    except FileNotFoundError:
        raise StorageError("no manifest.json: the data set is not whole", where=place.uri,
                           mend="run the pipeline again") from None
    if not isinstance(value, dict) or not {"files", "others", "formats", "documents"} <= value.keys():
        raise StorageError("the manifest is damaged", where=place.at(MANIFEST), mend="run the pipeline again")
    return value


def keys(place: Store) -> list[str]:
    """Keys of all files of the product at `place`."""
    manifest = read_manifest(place)
    return [MANIFEST, *manifest["others"], *(file["name"] for file in manifest["files"])]


def ids(place: Store) -> Iterator[pa.Array]:
    """Ids of the documents of the product at `place`.

    Raises:
        InputError: none of its formats is one of `NAMING`.
    """
    manifest = read_manifest(place)
    kind = next((name for name in NAMING if name in manifest["formats"]), None)
    if kind is None:
        raise InputError(f"the ids of documents are read from {', '.join(NAMING)}; this data set has "
                         f"{', '.join(manifest['formats'])}", where=place.uri,
                         mend="add one of them to write.formats and run the pipeline again")
    for file in manifest["files"]:
        if file["format"] == kind:
            with place.open(file["name"]) as stream:
                yield from _ids(kind, stream)


def _ids(kind: str, stream: Any) -> Iterator[pa.Array]:
    if kind == "parquet":
        for batch in pq.ParquetFile(stream).iter_batches(columns=["id"]):
            yield batch.column(0)
    elif kind == "arrow":
        file = pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=[0]))
        for number in range(file.num_record_batches):
            yield file.get_batch(number).column(0)
    else:
        for line in zstd.ZstdFile(stream):
            yield pa.array([json.loads(line)["id"]], pa.string())
