"""Read a product with the reference readers of its formats, and compare.

    python -m tests.benchmarks.product_readers OUTPUT/dataset

Tidewheel does not depend on them: install them into a separate folder and put it on PYTHONPATH,

    pip install --target readers --no-deps datasets multiprocess dill httpx httpcore h11 anyio mlcroissant rdflib \\
        absl-py etils jsonpath-rw ply decorator GitPython gitdb smmap python-magic mosaicml-streaming python-snappy \\
        cramjam zstd Brotli catalogue megatron-core

The product has every format, as written by a recipe that ends in `tokenize` and `write: {formats: [parquet, jsonl,
arrow, mds, megatron]}`. These versions agree: datasets 5.2.0, mlcroissant 1.1.1, mosaicml-streaming 0.13.0,
megatron-core 0.16.1.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def main(folder: Path) -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = [row for path in sorted((folder / "data").glob("train-*")) for row in pq.read_table(path).to_pylist()]
    print(f"{len(rows):,} documents in train")
    for read in (hugging_face, croissant, mosaic, megatron):
        read(folder, rows)
        print(f"{read.__name__}: the same")
    return 0


def hugging_face(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Compare the card's configuration and the other formats that `datasets` reads."""
    import datasets

    assert datasets.load_dataset(str(folder))["train"].to_list() == rows
    for kind, name in (("arrow", "arrow"), ("json", "jsonl")):
        paths = sorted(map(str, (folder / name).glob("train-*")))
        records = datasets.load_dataset(kind, data_files=paths)["train"]
        assert records["text"][:] == [row["text"] for row in rows], kind


def croissant(folder: Path, rows: list[dict[str, Any]]) -> None:
    import mlcroissant

    records = mlcroissant.Dataset(jsonld=str(folder / "croissant.json"))
    assert not records.metadata.issues.errors
    assert [record["train/id"].decode() for record in records.records("train")] == [row["id"] for row in rows]


def mosaic(folder: Path, rows: list[dict[str, Any]]) -> None:
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        stub: Any = types.ModuleType(name)  # needed by its image readers, which are imported with it
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
        stub.VisionDataset, stub.to_tensor = object, None
        sys.modules.setdefault(name, stub)
    from streaming import StreamingDataset

    records = StreamingDataset(local=str(folder / "mds"), split="train", shuffle=False, batch_size=1,
                             validate_hash="sha256")
    assert [records[index] for index in range(len(records))] == [
        {name: value or "" for name, value in row.items()} for row in rows]


def megatron(folder: Path, rows: list[dict[str, Any]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from tidewheel.shards.tokenizer import of_manifest
    from tidewheel.storage import store

    encoder = of_manifest(store(folder), json.loads((folder / "manifest.json").read_text())["tokenizer"])
    texts = []
    for line in (folder / "megatron/train.txt").read_text().splitlines():
        records = IndexedDataset(str(folder / line.split()[1]))
        assert records.document_indices.tolist() == list(range(len(records) + 1))
        marks = (encoder.bos, encoder.eos)
        texts += [encoder.decode([token for token in records[index].tolist() if token not in marks])
                  for index in range(len(records))]
    assert texts == [row["text"] for row in rows]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
