"""The last stage: documents of a partition -> tokens -> packed rows -> shard files of the training and validation sets.

Shards are written where they belong at once, under the name of their content; they count when the manifests,
written after the last partition, name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import pack as packing
from tidewheel.data import verdicts
from tidewheel.data.config import PackStep
from tidewheel.data.stage import Published, code_version, read_file, unit_key
from tidewheel.data.stage import Unit as StageUnit
from tidewheel.data.stages import ngrams
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.tokenizer import Encoder
from tidewheel.shards.format import write_shard
from tidewheel.shards.manifest import Manifest, ShardInfo, write_manifest
from tidewheel.storage import Stamp, content_hash, store

STAGE = "pack"
TRAINING, VALIDATION = "shards", "validation"
SETS = (TRAINING, VALIDATION)
_MODULES = ("tidewheel.data.tokenizer", "tidewheel.data.pack", "tidewheel.data.verdicts", "tidewheel.shards.format",
            "tidewheel.data.stages.ngrams", "tidewheel.data.stages.pack", "tidewheel.data.stages.partition")
_SPLIT_SALT = 0x5EED  # keeps the split independent of the partition, which comes from the same hash unsalted


def tasks(job: Job, parts: list[Part], tokenizer: Stamp) -> list[Task]:
    """One unit for each partition."""
    step: PackStep = job.config.step("pack")
    settings = {**step.canonical(), "seed": job.config.seed, "max_tokens": max(ngrams.MAX_TOKENS // job.partitions, 1)}
    code = code_version(*_MODULES)
    return [
        Task(job.output, StageUnit(STAGE, f"part-{part.number:05d}", unit_key(
            STAGE, settings=[settings, part.number, job.partitions], code=code,
            inputs=[tokenizer.hash, *part.content()]), part.number),
            {**part.inputs(), **settings, "tokenizer": tokenizer})
        for part in parts
    ]


def run(job: Job, runner: Runner, parts: list[Part], tokenizer: Stamp) -> Finished:
    """Every partition, packed."""
    return runner.complete(STAGE, tasks(job, parts, tokenizer), lambda missing: map_units(missing, pack_part))


@lru_cache(maxsize=2)
def _encoder(output: str, key: str, size: int, hash: str) -> Encoder:
    return Encoder(read_file(store(output), Stamp(key, size, hash)))


def _dtype(encoder: Encoder) -> str:
    """The narrowest type that holds every token."""
    return "uint16" if encoder.padded_size <= 1 << 16 else "uint32"


def pack_part(task: Task) -> Published:
    """The unit of one partition: shard files of both sets, and token counts."""
    inputs = task.inputs
    stamp = inputs["tokenizer"]
    encoder = _encoder(task.output, stamp.key, stamp.bytes, stamp.hash)
    ids, tokens, sizes, text_bytes = _encode(task, encoder)
    hashes = verdicts.hash_ids(ids, seed=_SPLIT_SALT + inputs["seed"])
    held_out = hashes.astype(np.float64) / 2.0**64 < inputs["validation_fraction"]
    writer = task.writer()
    summary: dict[str, Any] = {"documents_in": inputs["count"], "bytes": int(text_bytes.sum())}
    for name, chosen in ((TRAINING, ~held_out), (VALIDATION, held_out)):
        rows = np.flatnonzero(chosen)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[rows])])
        packed = packing.pack(ids.take(pa.array(rows)), tokens[np.repeat(chosen, sizes)], offsets,
                              sequence_length=inputs["sequence_length"],
                              token_dtype=_dtype(encoder), pad_id=encoder.pad)
        assert int(packed["length"].to_numpy().sum()) == offsets[-1], f"{task.unit}: packing lost tokens"
        infos = _write(task, name, packed)
        for number, info in enumerate(infos):
            writer.add(f"{name}-{number:06d}", Stamp(f"{name}/{info.name}", info.bytes, info.hash))
        unigrams, bigrams = ngrams.to_tables(ngrams.count([packed], encoder.padded_size, inputs["max_tokens"]))
        writer.table(f"{name}-unigrams", unigrams)
        writer.table(f"{name}-bigrams", bigrams)
        summary[name] = {"documents": len(rows), "tokens": int(offsets[-1]),
                         "shards": [[info.name, info.rows, info.tokens, info.bytes, info.hash] for info in infos]}
    return writer.publish(summary)


def _encode(task: Task, encoder: Encoder) -> tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray]:
    """(ids, tokens uint32 [t], tokens per document int64 [n], text bytes per document) of what is left of a part."""
    ids, tokens, sizes, lengths = [], [np.zeros(0, np.uint32)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in load_documents(task.store, task.inputs):
        flat, offsets = encoder.encode(table["text"].to_pylist())
        ids.append(table["id"].combine_chunks())
        tokens.append(flat)
        sizes.append(np.diff(offsets))
        lengths.append(pa.compute.binary_length(table["text"]).to_numpy().astype(np.int64))
    names = pa.chunked_array(ids, pa.string()).combine_chunks()
    return names, np.concatenate(tokens), np.concatenate(sizes), np.concatenate(lengths)


def _write(task: Task, name: str, packed: pa.Table) -> list[ShardInfo]:
    place = task.store.child(name)
    step = task.inputs["rows_per_shard"]
    return [write_shard(place, packed.slice(first, step)) for first in range(0, len(packed), step)]


def commit(job: Job, units: list[Published], tokenizer: bytes, evaluation_sets: Sequence[dict[str, Any]]
           ) -> dict[str, Manifest]:
    """Publish both sets: the tokenizer, then the manifests, the training set's last."""
    encoder = Encoder(tokenizer)
    step: PackStep = job.config.step("pack")
    found = {}
    for name in reversed(SETS):
        place = job.store.child(name)
        place.write("tokenizer.json", tokenizer)
        found[name] = Manifest(
            sequence_length=step.sequence_length, token_dtype=_dtype(encoder),
            vocabulary_size=encoder.padded_size,
            tokenizer={"file": "tokenizer.json", "hash": content_hash(tokenizer), "eos": encoder.eos,
                       "pad": encoder.pad},
            recipe_hash=job.config.recipe_hash(), evaluation_sets=tuple(evaluation_sets),
            documents=sum(unit.summary[name]["documents"] for unit in units),
            shards=tuple(ShardInfo(*shard) for unit in units for shard in unit.summary[name]["shards"]))
        write_manifest(place, found[name])
    return found
