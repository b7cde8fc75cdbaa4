"""Stage `pack`: documents of a partition -> tokens -> rows -> shard files of the training and validation sets.

Units write shards to their final place, named by their content. The manifests, written after the last partition, make
them part of the set. With `waves` the validation set is packed and published first, and the training set's partitions
are published group by group as they are packed (`shards.growing`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import verdicts
from tidewheel.data.config import PackStep, PipelineConfig
from tidewheel.data.stage import Published, UnitWriter, read_file, unit_key
from tidewheel.data.stage import Unit as StageUnit
from tidewheel.data.stages import by_source, ngrams, origin, tokens
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.kept import VERSION as KEPT
from tidewheel.data.stages.kept import Kept
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.tokenize import pack as packing
from tidewheel.data.tokenize.tokenizer import settings_of
from tidewheel.shards import growing
from tidewheel.shards.format import write_shard
from tidewheel.shards.manifest import PACKED, PREFERENCES, Manifest, ShardInfo, write_manifest
from tidewheel.shards.tokenizer import Encoder, Settings, load
from tidewheel.storage import Stamp, Store, content_hash, store
from tidewheel.versions import Version

STAGE, HELD_OUT = "pack", "pack_validation"
TRAINING, VALIDATION = "shards", "validation"
SETS = (TRAINING, VALIDATION)
VERSION = Version("pack", uses=(tokens.VERSION, KEPT))
_SPLIT_SALT = 0x5EED
"""Makes the split independent of the partition, which follows from the same hash without a salt."""


def tasks(job: Job, parts: list[Part], tokenizer: Stamp, only: str = "") -> list[Task]:
    """Return a task for each partition.

    Args:
        job: what the stage works on.
        parts: the partitions.
        tokenizer: file of the tokenizer.
        only: pack only the documents of this set, one of `SETS`; "" for both.
    """
    step: PackStep = job.config.step("pack")
    more_settings = {"seed": job.config.seed, "max_tokens": ngrams.share(job.partitions),
                     "kind": job.config.read.kind, **({"margins": True} if job.config.read.margin else {}),
                     **({"steps": True} if job.config.read.step_labels else {}),
                     "settings": settings_of(job.config.step("tokenize")).canonical(),
                     "chat_template": job.chat_template,
                     # always in the keys of conversations: those without a learnt token have been dropped since then
                     **({"loss": job.config.step("tokenize").loss} if job.config.read.kind == "chat" else {}),
                     **({"only": only} if only else {})}
    decisive = {**step.decisive(), **more_settings}
    decisive.pop("waves", None)  # units do not depend on the number of waves
    stage = HELD_OUT if only == VALIDATION else STAGE
    return [
        Task(job.output, StageUnit(stage, f"part-{part.number:05d}", unit_key(
            stage, settings=[decisive, part.number, job.partitions], version=VERSION,
            inputs=[tokenizer.hash, *part.content()]), part.number),
            {**part.inputs(), **step.canonical(), **more_settings, "tokenizer": tokenizer})
        for part in parts
    ]


def run(job: Job, runner: Runner, parts: list[Part], tokenizer: Stamp, evaluation_sets: Sequence[dict[str, Any]] = ()
        ) -> Finished:
    """Pack every partition; with `waves` each partition has two units, one for each set.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.
        tokenizer: file of the tokenizer.
        evaluation_sets: fingerprints of the evaluation sets, for the manifests.
    """
    def execute(missing: list[Task]) -> Iterator[Published]:
        return map_units(missing, pack_part)

    if not job.config.step("pack").waves:
        return runner.complete(STAGE, tasks(job, parts, tokenizer), execute)
    held_out = runner.complete(HELD_OUT, tasks(job, parts, tokenizer, VALIDATION), execute)
    todo = tasks(job, parts, tokenizer, TRAINING)
    waves = Waves(job, todo, held_out.units, tokenizer, evaluation_sets)
    packed = runner.complete(STAGE, todo, execute, follow=waves)
    return Finished([*held_out.units, *packed.units], held_out.reused + packed.reused,
                    held_out.seconds + packed.seconds)


class Waves:
    """Publisher of a set that is still being packed: first the validation set, then each wave when it is complete.

    Args:
        job: what the stage works on.
        todo: tasks of the training set, in order.
        held_out: published units of the validation set.
        tokenizer: file of the tokenizer.
        evaluation_sets: fingerprints of the evaluation sets, for the manifests.
    """

    def __init__(self, job: Job, todo: Sequence[Task], held_out: list[Published], tokenizer: Stamp,
                 evaluation_sets: Sequence[dict[str, Any]]) -> None:
        self._job = job
        self._held_out = held_out
        self._tokenizer = tokenizer
        self._evaluation_sets = evaluation_sets
        numbers = _wave_numbers(job)
        self._waves: list[list[str]] = [[] for _ in range(numbers[-1] + 1)]
        for task in todo:
            self._waves[numbers[task.unit.number]].append(task.unit.key)
        self._growing: growing.Growing | None = None

    def __call__(self, published: Mapping[str, Published]) -> None:
        """Publish the waves that are complete, given all units published so far, by key."""
        folder = self._job.store.child(TRAINING)
        if self._growing is None:
            self._growing = self._begin(folder)
        while self._growing.manifest.to_come:
            keys = self._waves[len(self._growing.manifest.waves)]
            if not all(key in published for key in keys):
                return
            shards = _shards(TRAINING, [published[key] for key in keys])
            self._growing = growing.publish(folder, self._growing, shards)

    def _begin(self, folder: Store) -> growing.Growing:
        file = read_file(self._job.store, self._tokenizer)
        publish(self._job, VALIDATION, self._held_out, file, self._evaluation_sets)
        head = _manifest(self._job, TRAINING, [], file, self._evaluation_sets)
        folder.write(head.tokenizer["file"], file)
        return growing.begin(folder, replace(head, waves=(), to_come=len(self._waves)))


def _wave_numbers(job: Job) -> list[int]:
    """Return the wave of each partition: adjacent partitions in groups of about equal size."""
    num_waves = min(job.config.step("pack").waves, job.partitions)
    return [partition * num_waves // job.partitions for partition in range(job.partitions)] if num_waves else []


def encoder_of(task: Task) -> Encoder:
    """Return the tokenizer that a task names by the inputs `tokenizer` and `settings`; tasks of a worker share it."""
    stamp = task.inputs["tokenizer"]
    return _encoder(task.output, stamp.key, stamp.bytes, stamp.hash, json.dumps(task.inputs["settings"]))


@lru_cache(maxsize=2)
def _encoder(output: str, key: str, size: int, hash: str, settings: str) -> Encoder:
    return load(read_file(store(output), Stamp(key, size, hash)), Settings(**json.loads(settings)))


def token_dtype(encoder: Encoder) -> str:
    """Return the narrowest type that holds every token."""
    return "uint16" if encoder.padded_size <= 1 << 16 else "uint32"


def pack_part(task: Task) -> Published:
    """Publish the unit of one partition: shard files of both sets, and token counts."""
    encoder = encoder_of(task)
    writer = task.writer()
    documents = load_documents(task.store, task.inputs)
    only = task.inputs.get("only")
    if only:
        documents = _chosen(task, documents)
    kept = Kept()
    documents = kept.watch(documents)
    encoded: tokens.Tokens | tokens.PairRows
    if task.inputs["kind"] == "preferences":
        encoded = tokens.encode_pairs(documents, encoder, task.inputs["chat_template"],
                                      token_dtype=token_dtype(encoder),
                                      sequence_length=task.inputs["sequence_length"],
                                      margins=task.inputs.get("margins", False),
                                      steps=task.inputs.get("steps", False))
        sets = _pair_sets(task, encoded)
    else:
        encoded = tokens.encode(documents, encoder, task.inputs["chat_template"],
                                task.inputs.get("loss", "assistant"))
        sets = _packed_sets(task, encoder, encoded)
    summary = {**_dropped(writer, encoded.dropped, encoded.heads), "kept": kept.samples(encoded.dropped),
               "source_tokens": _source_tokens(task, encoded, kept)}
    for name, (count, table) in sets.items():
        infos = _write(task, name, table)
        for index, info in enumerate(infos):
            writer.add(f"{name}-{index:06d}", Stamp(f"{name}/{info.name}", info.bytes, info.hash))
        rows = [table] if "length" in table.column_names else []  # pairs have no n-gram counts
        unigrams, bigrams = ngrams.to_tables(ngrams.count(rows, encoder.padded_size, task.inputs["max_tokens"]))
        writer.table(f"{name}-unigrams", unigrams)
        writer.table(f"{name}-bigrams", bigrams)
        summary[name] = {"documents": count, "tokens": sum(info.tokens for info in infos),
                         "shards": [[info.name, info.rows, info.tokens, info.bytes, info.hash] for info in infos]}
        if "loss_mask" in table.column_names:
            summary[name]["loss_tokens"] = int(table["loss_mask"].combine_chunks().flatten().to_numpy().sum())
    count_in = task.inputs["count"] if not only else sum(count for count, _ in sets.values()) + len(encoded.dropped)
    return writer.publish({"documents_in": count_in, "bytes": encoded.text_bytes, **summary})


def _chosen(task: Task, documents: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the documents of the set that the task packs."""
    for table in documents:
        held_out = is_held_out(task, table["id"].combine_chunks())
        selected = table.filter(pa.array(held_out if task.inputs["only"] == VALIDATION else ~held_out))
        if len(selected):
            yield selected


def _source_tokens(task: Task, encoded: tokens.Tokens | tokens.PairRows, kept: Kept) -> by_source.BySource:
    """Return {source: [documents, tokens]} of the training set."""
    if isinstance(encoded, tokens.Tokens):
        ids = encoded.ids
        sizes = encoded.sizes
    else:
        ids = encoded.table["document_id"].combine_chunks()
        sizes = sum(pc.list_value_length(encoded.table[name]).to_numpy() for name in ("chosen", "rejected"))
    in_training = ~is_held_out(task, ids)
    return by_source.largest(kept.tokens(ids.filter(pa.array(in_training)), sizes[in_training]), by_source.UNIT_SOURCES)


def _dropped(writer: UnitWriter, dropped: pa.Table, heads: pa.Table) -> dict[str, Any]:
    if not len(dropped):
        return {"dropped": {}, "samples": {}}
    writer.shared("verdicts", f"verdicts/{STAGE}", ".parquet", verdicts.encode(dropped))
    return {"dropped": verdicts.counts(dropped), "samples": verdicts.samples(dropped, heads)}


def is_held_out(task: Task, ids: pa.Array) -> np.ndarray:
    """Return whether each document belongs to the validation set, bool [n]."""
    hashes = verdicts.hash_ids(ids, seed=_SPLIT_SALT + task.inputs["seed"])
    return hashes.astype(np.float64) / 2.0**64 < task.inputs["validation_fraction"]


def _packed_sets(task: Task, encoder: Encoder, encoded: tokens.Tokens) -> dict[str, tuple[int, pa.Table]]:
    """Return (number of documents, packed rows) of both sets."""
    held_out = is_held_out(task, encoded.ids)
    inputs = task.inputs
    sets = {}
    for name, selected in ((TRAINING, ~held_out), (VALIDATION, held_out)):
        rows = np.flatnonzero(selected)
        own = np.repeat(selected, encoded.sizes)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(encoded.sizes[rows])])
        packed = packing.pack(encoded.ids.take(pa.array(rows)), encoded.tokens[own], offsets,
                              sequence_length=inputs["sequence_length"], token_dtype=token_dtype(encoder),
                              pad_id=encoder.pad, window=inputs["window"], method=inputs["method"],
                              loss_mask=None if encoded.loss_mask is None else encoded.loss_mask[own])
        assert int(packed["length"].to_numpy().sum()) == offsets[-1], f"{task.unit}: packing lost tokens"
        sets[name] = (len(rows), packed)
    return sets


def _pair_sets(task: Task, encoded: tokens.PairRows) -> dict[str, tuple[int, pa.Table]]:
    """Return (number of documents, rows) of both sets of preference pairs."""
    held_out = pa.array(is_held_out(task, encoded.table["document_id"].combine_chunks()))
    sets = {TRAINING: encoded.table.filter(pc.invert(held_out)), VALIDATION: encoded.table.filter(held_out)}
    return {name: (len(table), table) for name, table in sets.items()}


def _write(task: Task, name: str, packed: pa.Table) -> list[ShardInfo]:
    folder = task.store.child(name)
    step = task.inputs["rows_per_shard"]
    return [write_shard(folder, packed.slice(first, step)) for first in range(0, len(packed), step)]


def encoder_for(config: PipelineConfig, tokenizer: bytes) -> Encoder:
    """Return the recipe's tokenizer, from the bytes of its file."""
    return load(tokenizer, settings_of(config.step("tokenize")))


def commit(job: Job, units: list[Published], tokenizer: bytes, evaluation_sets: Sequence[dict[str, Any]]
           ) -> dict[str, Manifest]:
    """Publish both sets: the validation set, then the training set.

    Args:
        job: what the stage works on.
        units: units of the pack stage.
        tokenizer: bytes of the tokenizer's file.
        evaluation_sets: fingerprints of the evaluation sets.
    """
    return {name: publish(job, name, units, tokenizer, evaluation_sets) for name in reversed(SETS)}


def publish(job: Job, name: str, units: Sequence[Published], tokenizer: bytes,
            evaluation_sets: Sequence[dict[str, Any]]) -> Manifest:
    """Publish one set: the tokenizer, then the manifest.

    Args:
        job: what the stage works on.
        name: one of `SETS`.
        units: units of the pack stage.
        tokenizer: bytes of the tokenizer's file.
        evaluation_sets: fingerprints of the evaluation sets.
    """
    folder = job.store.child(name)
    manifest = _manifest(job, name, units, tokenizer, evaluation_sets)
    folder.write(manifest.tokenizer["file"], tokenizer)
    write_manifest(folder, manifest)
    return manifest


def _manifest(job: Job, name: str, units: Sequence[Published], tokenizer: bytes,
              evaluation_sets: Sequence[dict[str, Any]]) -> Manifest:
    encoder = encoder_for(job.config, tokenizer)
    step: PackStep = job.config.step("pack")
    numbers = _wave_numbers(job) if name == TRAINING else []
    waves = [0] * (numbers[-1] + 1 if numbers else 0)
    for unit in units if waves else ():
        waves[numbers[unit.unit.number]] += len(unit.summary[name]["shards"])
    return Manifest(
        sequence_length=step.sequence_length, token_dtype=token_dtype(encoder), vocabulary_size=encoder.padded_size,
        tokenizer=encoder.manifest(content_hash(tokenizer)), recipe_hash=job.config.recipe_hash(),
        evaluation_sets=tuple(evaluation_sets), documents=sum(unit.summary[name]["documents"] for unit in units),
        shards=tuple(_shards(name, units)), loss_mask=job.config.read.kind == "chat", waves=tuple(waves),
        kind=PREFERENCES if job.config.read.kind == "preferences" else PACKED,
        recipe=origin.settings_of(job.config), chat_template=job.chat_template, margins=bool(job.config.read.margin),
        unpaired=bool(job.config.read.label or job.config.read.step_labels),
        step_labels=bool(job.config.read.step_labels))


def _shards(name: str, units: Sequence[Published]) -> list[ShardInfo]:
    return [ShardInfo(*shard) for unit in units for shard in unit.summary[name]["shards"]]
