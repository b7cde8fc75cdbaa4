"""Stage `write`: write the remaining documents below `dataset/`; a unit writes the files of one partition.

File names contain the key of their unit, so a name never gets other content. `dataset/manifest.json`, written last,
makes the files part of the product. Only then files that it does not name are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data.config import WriteStep
from tidewheel.data.product import FOLDER, MANIFEST, card, croissant
from tidewheel.data.product.formats import (
    FOLDERS,
    SUFFIXES,
    MegatronWriter,
    mds_index,
    megatron_dtype,
    open_writer,
)
from tidewheel.data.product.rows import Batch, batch_of, batches
from tidewheel.data.stage import Published, Unit, UnitWriter, unit_key
from tidewheel.data.stages import by_source, keys, pack, tokens
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.kept import VERSION as KEPT
from tidewheel.data.stages.kept import Kept
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.tokenize.tokenizer import settings_of
from tidewheel.shards.tokenizer import Encoder
from tidewheel.storage import Stamp, content_hash
from tidewheel.versions import Version

STAGE = "write"
SPLITS = ("train", "validation")
FORMAT = 1
UNSTATED = "(not stated)"
VERSION = Version("write", uses=(KEPT,))
MEGATRON_VERSION = Version("write_megatron", uses=(VERSION, tokens.VERSION))


def product_of(job: Job) -> WriteStep:
    """Return the settings of `write`."""
    assert job.config.product is not None, "the recipe writes nothing"
    return job.config.product


def tasks(job: Job, parts: Sequence[Part], tokenizer: Stamp | None) -> list[Task]:
    """Return a task for each partition.

    Args:
        job: what the stage works on.
        parts: the partitions.
        tokenizer: file of the tokenizer; None if the recipe does not tokenize.
    """
    step = product_of(job)
    more_settings: dict[str, Any] = {"seed": job.config.seed}
    version = VERSION
    inputs: list[str] = []
    if "megatron" in step.formats:
        assert tokenizer is not None, "PipelineConfig rejects megatron without tokenize"
        more_settings["settings"] = settings_of(job.config.step("tokenize")).canonical()
        version = MEGATRON_VERSION
        inputs.append(tokenizer.hash)
    return [
        Task(job.output, Unit(STAGE, f"part-{part.number:05d}", unit_key(
            STAGE, settings=[{**step.decisive(), **more_settings}, part.number, job.partitions], version=version,
            inputs=[*inputs, *part.content()]),
            part.number), {**part.inputs(), **step.canonical(), **more_settings, "partitions": job.partitions,
                           "tokenizer": tokenizer})
        for part in parts
    ]


def run(job: Job, runner: Runner, parts: Sequence[Part], tokenizer: Stamp | None) -> Finished:
    """Write every partition.

    Args:
        job: what the stage works on.
        runner: completes the units.
        parts: partitions after the stage before.
        tokenizer: file of the tokenizer; None if the recipe does not tokenize.
    """
    return runner.complete(STAGE, tasks(job, parts, tokenizer), lambda missing: map_units(missing, write_part))


def write_part(task: Task) -> Published:
    """Publish the unit of one partition: its files and their counts."""
    writer = task.writer()
    inputs = task.inputs
    encoder = pack.encoder_of(task) if "megatron" in inputs["formats"] else None
    counted: dict[str, list[by_source.BySource]] = {"source": [], "language": [], "license": []}
    text_bytes = 0
    kept = Kept()
    with contextlib.ExitStack() as closing:
        series = {(split, kind): closing.enter_context(_Series(task, writer, split, kind, encoder))
                  for split in SPLITS for kind in inputs["formats"]}
        for documents in batches(kept.watch(load_documents(task.store, inputs)), inputs["shard_bytes"]):
            held_out = pack.is_held_out(task, documents["id"].combine_chunks())
            for split, selected in zip(SPLITS, (~held_out, held_out), strict=True):
                table = documents.filter(pa.array(selected))
                if not len(table):
                    continue
                batch = _tokenized(batch_of(table), table, encoder)
                text_bytes += batch.text_bytes
                for name, counts in counted.items():
                    names = pc.fill_null(batch.table[name], UNSTATED)
                    counts.append(by_source.tally(names, keys.lengths(batch.table["text"])))
                for kind in inputs["formats"]:
                    series[split, kind].add(batch)
    files = [file for one_series in series.values() for file in one_series.files]
    return writer.publish({
        "documents_in": inputs["count"], "documents": inputs["count"], "bytes": text_bytes, "files": files,
        "kept": kept.samples(),
        "sources": by_source.largest(by_source.merge(counted["source"]), by_source.UNIT_SOURCES),
        "languages": by_source.largest(by_source.merge(counted["language"]), by_source.UNIT_SOURCES),
        "licenses": by_source.largest(by_source.merge(counted["license"]), by_source.UNIT_SOURCES)})


def _tokenized(batch: Batch, documents: pa.Table, encoder: Encoder | None) -> Batch:
    if encoder is None:
        return batch
    encoded = tokens.encode([documents], encoder, "")
    return replace(batch, tokens=encoded.tokens, sizes=encoded.sizes)


class _Series:
    """Files of one split of a partition in one format; a new one starts when the last one is large enough.

    Args:
        task: the partition.
        writer: writer of its unit.
        split: name of the split.
        format: format of the files.
        encoder: the tokenizer; None for formats without tokens.
    """

    def __init__(self, task: Task, writer: UnitWriter, split: str, format: str, encoder: Encoder | None) -> None:
        self.files: list[dict[str, Any]] = []
        self._task = task
        self._writer = writer
        self._split = split
        self._format = format
        self._dtype = megatron_dtype(encoder.padded_size) if encoder is not None else ""
        self._closing: contextlib.ExitStack | None = None
        self._begun = 0

    def __enter__(self) -> _Series:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._closing is None:
            return
        if kind is None:
            self._end()
        else:  # an unfinished file does not appear
            self._sink.is_abandoned = True
            self._closing.__exit__(kind, *error)

    def add(self, batch: Batch) -> None:
        """Write a batch of documents."""
        if self._closing is None:
            self._begin()
        self._file.add(batch)
        self._rows += len(batch.table)
        self._bytes += batch.text_bytes
        self._tokens += 0 if batch.tokens is None else len(batch.tokens)
        if self._bytes >= self._task.inputs["shard_bytes"]:
            self._end()

    def _begin(self) -> None:
        unit = self._task.unit
        inputs = self._task.inputs
        folder = f"{FOLDERS[self._format]}/{self._split}" if self._format == "mds" else FOLDERS[self._format]
        self._stem = (f"{folder}/{self._split}-{unit.number:05d}-of-{inputs['partitions']:05d}-{self._begun:03d}-"
                      f"{unit.key[:16]}")
        self._begun += 1
        self._rows = self._bytes = self._tokens = 0
        self._closing = contextlib.ExitStack()
        key = f"{FOLDER}/{self._stem}{SUFFIXES[self._format]}"
        self._sink = _Hashed(self._closing.enter_context(self._task.store.writer(key)))
        self._file = open_writer(self._format, self._sink, self._dtype)

    def _end(self) -> None:
        assert self._closing is not None
        closing = self._closing
        self._closing = None
        try:
            with closing:
                self._file.close()
        except BaseException:
            self._sink.is_abandoned = True
            raise
        self._record(self._sink.inner.stamp, self._sink.sha256())
        if isinstance(self._file, MegatronWriter):
            data = self._file.index()
            self._record(self._task.store.write(f"{FOLDER}/{self._stem}.idx", data), hashlib.sha256(data).hexdigest())

    def _record(self, stamp: Stamp, sha256: str) -> None:
        self._writer.add(stamp.key.removeprefix(f"{FOLDER}/"), stamp)
        tokens = {"tokens": self._tokens} if self._format == "megatron" else {}
        self.files.append({"name": stamp.key.removeprefix(f"{FOLDER}/"), "format": self._format, "split": self._split,
                           "rows": self._rows, "bytes": stamp.bytes, "hash": stamp.hash, "sha256": sha256, **tokens})


class _Hashed:
    """Sink that computes the SHA-256 of its bytes, which Croissant and MDS need."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._digest = hashlib.sha256()
        self.is_abandoned = False
        """Ignore further writes: Arrow's writers write the end of a file even when they are closed after an error."""

    def write(self, data: Any, /) -> int:
        if self.is_abandoned:
            return memoryview(data).nbytes
        if memoryview(data).nbytes:
            self._digest.update(data)
        return self.inner.write(data)

    def flush(self) -> None:
        """Do nothing; Arrow calls this on its sinks."""

    @property
    def closed(self) -> bool:
        return False

    def sha256(self) -> str:
        return self._digest.hexdigest()


def describe(job: Job, units: Sequence[Published], stages: Sequence[dict[str, Any]],
             evaluation_sets: Sequence[dict[str, Any]], tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the content of `manifest.json`, a function of the input and the recipe alone.

    Args:
        job: what the stage works on.
        units: units of the stage.
        stages: counts of the stages so far, as in the summary.
        evaluation_sets: fingerprints of the evaluation sets.
        tokenizer: entry on the tokenizer; None for formats without tokens.
    """
    step = product_of(job)
    files = [file for split in SPLITS for kind in step.formats for unit in units for file in unit.summary["files"]
             if (file["split"], file["format"]) == (split, kind)]
    return {
        "format": FORMAT, "name": job.config.name, "recipe_hash": job.config.recipe_hash(),
        "recipe": card.recipe_of(job.config), "kind": job.config.read.kind, "formats": list(step.formats),
        "documents": sum(unit.summary["documents"] for unit in units),
        "bytes": sum(unit.summary["bytes"] for unit in units),
        "splits": {split: _documents(files, split, step.formats[0]) for split in SPLITS},
        "files": files, "tokenizer": tokenizer, "evaluation_sets": list(evaluation_sets),
        "stages": [{name: stage[name] for name in ("name", "documents_in", "documents_out", "dropped", "edited",
                                                   "quarantined")} for stage in stages],
        **{name: by_source.largest(by_source.merge(unit.summary[name] for unit in units), by_source.REPORT_SOURCES)
           for name in ("sources", "languages", "licenses")}}


def _documents(files: Sequence[dict[str, Any]], split: str, format: str) -> int:
    return sum(file["rows"] for file in files if file["split"] == split and file["format"] == format
               and not file["name"].endswith(".idx"))


def commit(job: Job, units: Sequence[Published], stages: Sequence[dict[str, Any]],
           evaluation_sets: Sequence[dict[str, Any]], tokenizer: bytes) -> dict[str, Any]:
    """Publish the product: indexes, card and Croissant, then the manifest.

    Args:
        job: what the stage works on.
        units: units of the stage.
        stages: counts of the stages so far, as in the summary.
        evaluation_sets: fingerprints of the evaluation sets.
        tokenizer: bytes of the tokenizer's file; b"" if the recipe does not tokenize.

    Returns:
        The manifest.
    """
    folder = job.store.child(FOLDER)
    tokenizer_entry: dict[str, Any] | None = None
    more_files: dict[str, bytes] = {}
    if "megatron" in product_of(job).formats:
        entry = pack.encoder_for(job.config, tokenizer).manifest(content_hash(tokenizer))
        tokenizer_entry = {**entry, "file": f"megatron/{entry['file']}"}
        more_files[tokenizer_entry["file"]] = tokenizer
    manifest = describe(job, units, stages, evaluation_sets, tokenizer_entry)
    for split in SPLITS:
        files = [file for file in manifest["files"] if file["split"] == split]
        if shards := [{**file, "name": file["name"].rpartition("/")[2]} for file in files if file["format"] == "mds"]:
            more_files[f"mds/{split}/index.json"] = mds_index(shards)
        if paths := [file for file in files if file["name"].endswith(".bin")]:
            more_files[f"megatron/{split}.txt"] = "".join(
                f"{file['tokens']} {file['name'].removesuffix('.bin')}\n" for file in paths).encode()
    more_files["README.md"] = card.render(manifest).encode()
    more_files["croissant.json"] = croissant.render(manifest).encode()
    manifest["others"] = {name: content_hash(data) for name, data in sorted(more_files.items())}
    for name, data in more_files.items():
        folder.write(name, data)
    folder.write_json(MANIFEST, manifest)
    kept = {MANIFEST, *more_files, *(file["name"] for file in manifest["files"])}
    for stored in folder.list():
        if stored.key not in kept:
            folder.delete(stored.key)
    return manifest
