"""The last stage: documents of a partition -> tokens -> rows -> shard files of the training and validation sets.

Shards are written where they belong at once, under the name of their content; they count when the manifests,
written after the last partition, name them. With `waves` the validation set is packed first and published, and the
training set's partitions are published group by group as they are packed (`shards.growing`).
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
_SPLIT_SALT = 0x5EED  # keeps the split independent of the partition, which comes from the same hash unsalted


def tasks(job: Job, parts: list[Part], tokenizer: Stamp, only: str = "") -> list[Task]:
    """One unit for each partition; with `only` for its documents of that set."""
    step: PackStep = job.config.step("pack")
    others = {"seed": job.config.seed, "max_tokens": ngrams.share(job.partitions), "kind": job.config.read.kind,
              "settings": settings_of(job.config.step("tokenize")).canonical(), "chat_template": job.chat_template,
              **({"only": only} if only else {})}
    decisive = {**step.decisive(), **others}
    decisive.pop("waves", None)  # another number of them takes the same units
    stage = HELD_OUT if only == VALIDATION else STAGE
    return [
        Task(job.output, StageUnit(stage, f"part-{part.number:05d}", unit_key(
            stage, settings=[decisive, part.number, job.partitions], version=VERSION,
            inputs=[tokenizer.hash, *part.content()]), part.number),
            {**part.inputs(), **step.canonical(), **others, "tokenizer": tokenizer})
        for part in parts
    ]


def run(job: Job, runner: Runner, parts: list[Part], tokenizer: Stamp, evaluation_sets: Sequence[dict[str, Any]] = ()
        ) -> Finished:
    """Every partition, packed; with `waves` two units of each, one for each set."""
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
    """Publishes what can be read before all is packed: the validation set, then each wave when its last unit is there.

    Args:
        todo: the training set's units, in order.
        held_out: those of the validation set, published.
    """

    def __init__(self, job: Job, todo: Sequence[Task], held_out: list[Published], tokenizer: Stamp,
                 evaluation_sets: Sequence[dict[str, Any]]) -> None:
        self._job, self._held_out = job, held_out
        self._tokenizer, self._evaluation_sets = tokenizer, evaluation_sets
        numbers = _wave_numbers(job)
        self._waves: list[list[str]] = [[] for _ in range(numbers[-1] + 1)]
        for task in todo:
            self._waves[numbers[task.unit.number]].append(task.unit.key)
        self._growing: growing.Growing | None = None

    def __call__(self, found: Mapping[str, Published]) -> None:
        """Publish what is complete, given the units published so far, by key."""
        place = self._job.store.child(TRAINING)
        if self._growing is None:
            self._growing = self._begin(place)
        while self._growing.manifest.to_come:
            keys = self._waves[len(self._growing.manifest.waves)]
            if not all(key in found for key in keys):
                return
            self._growing = growing.publish(place, self._growing, _shards(TRAINING, [found[key] for key in keys]))

    def _begin(self, place: Store) -> growing.Growing:
        job, file = self._job, read_file(self._job.store, self._tokenizer)
        publish(job, VALIDATION, self._held_out, file, self._evaluation_sets)
        head = _manifest(job, TRAINING, [], file, self._evaluation_sets)
        place.write(head.tokenizer["file"], file)
        return growing.begin(place, replace(head, waves=(), to_come=len(self._waves)))


def _wave_numbers(job: Job) -> list[int]:
    """Which wave each partition is in: groups of neighbours, of equal number as far as may be."""
    number = min(job.config.step("pack").waves, job.partitions)
    return [partition * number // job.partitions for partition in range(job.partitions)] if number else []


def encoder_of(task: Task) -> Encoder:
    """The tokenizer of a task that has its file in `tokenizer` and its `settings`; kept from task to task."""
    stamp = task.inputs["tokenizer"]
    return _encoder(task.output, stamp.key, stamp.bytes, stamp.hash, json.dumps(task.inputs["settings"]))


@lru_cache(maxsize=2)
def _encoder(output: str, key: str, size: int, hash: str, settings: str) -> Encoder:
    return load(read_file(store(output), Stamp(key, size, hash)), Settings(**json.loads(settings)))


def token_dtype(encoder: Encoder) -> str:
    """The narrowest type that holds every token."""
    return "uint16" if encoder.padded_size <= 1 << 16 else "uint32"


def pack_part(task: Task) -> Published:
    """The unit of one partition: shard files of both sets, and token counts."""
    encoder, writer = encoder_of(task), task.writer()
    documents, only = load_documents(task.store, task.inputs), task.inputs.get("only")
    if only:
        documents = _chosen(task, documents)
    kept = Kept()
    documents = kept.watch(documents)
    found: tokens.Tokens | tokens.PairRows
    if task.inputs["kind"] == "preferences":
        found = tokens.encode_pairs(documents, encoder, task.inputs["chat_template"], token_dtype=token_dtype(encoder),
                                    sequence_length=task.inputs["sequence_length"])
        sets = _pair_sets(task, found)
    else:
        found = tokens.encode(documents, encoder, task.inputs["chat_template"])
        sets = _packed_sets(task, encoder, found)
    summary = {**_dropped(writer, found.dropped, found.heads), "kept": kept.samples(found.dropped),
               "source_tokens": _source_tokens(task, found, kept)}
    for name, (count, table) in sets.items():
        infos = _write(task, name, table)
        for number, info in enumerate(infos):
            writer.add(f"{name}-{number:06d}", Stamp(f"{name}/{info.name}", info.bytes, info.hash))
        rows = [table] if "length" in table.column_names else []  # of pairs nothing is counted
        unigrams, bigrams = ngrams.to_tables(ngrams.count(rows, encoder.padded_size, task.inputs["max_tokens"]))
        writer.table(f"{name}-unigrams", unigrams)
        writer.table(f"{name}-bigrams", bigrams)
        summary[name] = {"documents": count, "tokens": sum(info.tokens for info in infos),
                         "shards": [[info.name, info.rows, info.tokens, info.bytes, info.hash] for info in infos]}
        if "loss_mask" in table.column_names:
            summary[name]["loss_tokens"] = int(table["loss_mask"].combine_chunks().flatten().to_numpy().sum())
    taken = task.inputs["count"] if not only else sum(count for count, _ in sets.values()) + len(found.dropped)
    return writer.publish({"documents_in": taken, "bytes": found.text_bytes, **summary})


def _chosen(task: Task, documents: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The documents of the one set that the task is for."""
    for table in documents:
        held_out = is_held_out(task, table["id"].combine_chunks())
        chosen = table.filter(pa.array(held_out if task.inputs["only"] == VALIDATION else ~held_out))
        if len(chosen):
            yield chosen


def _source_tokens(task: Task, found: tokens.Tokens | tokens.PairRows, kept: Kept) -> by_source.BySource:
    """{source: [documents, tokens]} of the training set."""
    if isinstance(found, tokens.Tokens):
        ids, sizes = found.ids, found.sizes
    else:
        ids = found.table["document_id"].combine_chunks()
        sizes = sum(pc.list_value_length(found.table[name]).to_numpy() for name in ("chosen", "rejected"))
    chosen = ~is_held_out(task, ids)
    return by_source.largest(kept.tokens(ids.filter(pa.array(chosen)), sizes[chosen]), by_source.UNIT_SOURCES)


def _dropped(writer: UnitWriter, dropped: pa.Table, heads: pa.Table) -> dict[str, Any]:
    if not len(dropped):
        return {"dropped": {}, "samples": {}}
    writer.shared("verdicts", f"verdicts/{STAGE}", ".parquet", verdicts.encode(dropped))
    return {"dropped": verdicts.counts(dropped), "samples": verdicts.samples(dropped, heads)}


def is_held_out(task: Task, ids: pa.Array) -> np.ndarray:
    """True for the documents of the validation set, bool [n]."""
    hashes = verdicts.hash_ids(ids, seed=_SPLIT_SALT + task.inputs["seed"])
    return hashes.astype(np.float64) / 2.0**64 < task.inputs["validation_fraction"]


def _packed_sets(task: Task, encoder: Encoder, found: tokens.Tokens) -> dict[str, tuple[int, pa.Table]]:
    """(documents, rows) of both sets, packed."""
    held_out, inputs = is_held_out(task, found.ids), task.inputs
    sets = {}
    for name, chosen in ((TRAINING, ~held_out), (VALIDATION, held_out)):
        rows, own = np.flatnonzero(chosen), np.repeat(chosen, found.sizes)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(found.sizes[rows])])
        packed = packing.pack(found.ids.take(pa.array(rows)), found.tokens[own], offsets,
                              sequence_length=inputs["sequence_length"], token_dtype=token_dtype(encoder),
                              pad_id=encoder.pad, window=inputs["window"], method=inputs["method"],
                              loss_mask=None if found.loss_mask is None else found.loss_mask[own])
        assert int(packed["length"].to_numpy().sum()) == offsets[-1], f"{task.unit}: packing lost tokens"
        sets[name] = (len(rows), packed)
    return sets


def _pair_sets(task: Task, found: tokens.PairRows) -> dict[str, tuple[int, pa.Table]]:
    """(documents, rows) of both sets, pairs."""
    held_out = pa.array(is_held_out(task, found.table["document_id"].combine_chunks()))
    sets = {TRAINING: found.table.filter(pc.invert(held_out)), VALIDATION: found.table.filter(held_out)}
    return {name: (len(table), table) for name, table in sets.items()}


def _write(task: Task, name: str, packed: pa.Table) -> list[ShardInfo]:
    place = task.store.child(name)
    step = task.inputs["rows_per_shard"]
    return [write_shard(place, packed.slice(first, step)) for first in range(0, len(packed), step)]


def encoder_for(config: PipelineConfig, tokenizer: bytes) -> Encoder:
    """The recipe's tokenizer, from the bytes of its file."""
    return load(tokenizer, settings_of(config.step("tokenize")))


def commit(job: Job, units: list[Published], tokenizer: bytes, evaluation_sets: Sequence[dict[str, Any]]
           ) -> dict[str, Manifest]:
    """Publish both sets: the tokenizer, then the manifests, the training set's last."""
    return {name: publish(job, name, units, tokenizer, evaluation_sets) for name in reversed(SETS)}


def publish(job: Job, name: str, units: Sequence[Published], tokenizer: bytes,
            evaluation_sets: Sequence[dict[str, Any]]) -> Manifest:
    """Publish one set."""
    place, manifest = job.store.child(name), _manifest(job, name, units, tokenizer, evaluation_sets)
    place.write(manifest.tokenizer["file"], tokenizer)
    write_manifest(place, manifest)
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
        recipe=origin.settings_of(job.config))


def _shards(name: str, units: Sequence[Published]) -> list[ShardInfo]:
    return [ShardInfo(*shard) for unit in units for shard in unit.summary[name]["shards"]]
