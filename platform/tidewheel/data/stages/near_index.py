"""Signatures of an earlier dump on storage, so that a later dump can be deduplicated against it.

The folder `near_index` below an output has `manifest.json` (the parameters, and the files with their hashes) and an
Arrow file for each partition, named by its content. The files hold all documents that reached near-deduplication, also
the dropped ones: those still produce candidates, so the result equals that of one run over both dumps in which the
older dump wins. If pairs can be in doubt, the files also hold the shingle sets, 4 bytes for each shingle.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import dedup, verdicts
from tidewheel.data.dedup import minhash
from tidewheel.data.stage import Published, Unit, read_file, read_table, unit_key, write_ipc
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.near_shingles import sets_of
from tidewheel.data.stages.partition import load_keys
from tidewheel.errors import InputError
from tidewheel.storage import Stamp, absolute, content_hash, join, safe_key, store
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.data.config import DedupNearStep
    from tidewheel.data.stages.job import Job

STAGE = FOLDER = "near_index"
MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest's format."""
VERSION = Version("near_index", uses=(dedup.VERSION, minhash.VERSION))
_KEYS = ("id", "priority", "quality", "length", "hash_hi", "hash_lo", "shingles", "signature")
_ABOVE = 1 << 33
"""Added to the int32 priority of an older dump's documents, once for each dump that it is older than."""


@dataclass(frozen=True)
class Index:
    """An index, as described by its manifest.

    Args:
        number: position in `against`, 0 for the oldest index.
        uri: the folder.
        hash: content hash of the manifest.
        above: added to the priority of the index's documents.
        files: a file for each of the index's partitions.
    """

    number: int
    uri: str
    hash: str
    above: int
    files: tuple[Stamp, ...]

    def read(self, file: Stamp, columns: Sequence[str]) -> pa.Table:
        """Return columns of one file; ids are `dedup.old_ids`, priorities are above those of later dumps."""
        table = read_table(store(self.uri), file, columns)
        table = table.set_column(table.column_names.index("id"), "id", dedup.old_ids(table["id"], self.number))
        if "priority" in columns:
            raised = pc.add(table["priority"].cast(pa.int64()), self.above)
            table = table.set_column(table.column_names.index("priority"), "priority", raised)
        return table.select(list(columns))

    def overlapping(self, partition: int, partitions: int) -> tuple[Stamp, ...]:
        """Return the files with ids of partition `number` of `partitions`: partitions are ranges of the id hash."""
        count = len(self.files)
        return self.files[partition * count // partitions : -(-(partition + 1) * count // partitions)]


def parameters(step: DedupNearStep) -> dict[str, Any]:
    """Return the parameters that two runs must share for one to be deduplicated against the other."""
    return {"signatures": minhash.MINHASH_VERSION, "unit": step.unit, "ngram": step.ngram,
            "permutations": step.num_permutations, "bands": step.bands, "rows": step.rows, "seed": step.seed,
            "verify": step.verify, "doubt": step.doubt, "min_jaccard": step.min_jaccard}


def open_indexes(step: DedupNearStep, input: str) -> tuple[Index, ...]:
    """Return the indexes that a step names.

    Raises:
        InputError: an index is missing or damaged, or was made with other parameters.
    """
    indexes = []
    for index, path in enumerate(step.against):
        uri = absolute(path if "://" in path or path.startswith(("/", "~")) else join(input, path))
        indexes.append(_open(step, index, uri))
    return tuple(indexes)


@dataclass(frozen=True)
class Manifest:
    """Manifest of an index.

    Args:
        parameters: `parameters` of the step that wrote it, not checked yet.
        files: a file for each of the index's partitions.
        documents: number of documents in the files.
        hash: content hash of the manifest.
    """

    parameters: Mapping[str, Any]
    files: tuple[Stamp, ...]
    documents: int
    hash: str


def read_manifest(uri: str) -> Manifest:
    """Read the manifest of the index in the folder `uri`.

    Raises:
        InputError: the manifest is missing, damaged, or has a format that this version does not read.
    """
    folder = store(uri)
    try:
        data = folder.read(MANIFEST)
    except FileNotFoundError:
        raise InputError("there is no index of an earlier dump", where=uri,
                         fix="give the folder near_index of an output written with dedup_near: {write_index: true}"
                         ) from None
    try:
        content = json.loads(data)
        files = tuple(Stamp(safe_key(key), size, digest) for key, size, digest in content["files"])
        manifest = Manifest(dict(content["parameters"]), files, int(content["documents"]), content_hash(data))
        readable = content["version"] == FORMAT and bool(files)
    except (ValueError, KeyError, TypeError):
        readable = False
    if not readable:
        raise InputError("not a manifest of an index that this version reads", where=folder.at(MANIFEST),
                         fix="write the index again with write_index")
    return manifest


def _open(step: DedupNearStep, number: int, uri: str) -> Index:
    manifest = read_manifest(uri)
    known = manifest.parameters
    wrong = [f"{name} is {known.get(name)!r} there and {value!r} here" for name, value in parameters(step).items()
             if known.get(name) != value]
    if wrong:
        raise InputError(f"the index was made with other parameters: {'; '.join(wrong)}", where=uri,
                         fix="use the parameters of the index, or write it again with these")
    return Index(number, uri, manifest.hash, _ABOVE * (len(step.against) - number), manifest.files)


def source_tasks(job: Job, settings: Mapping[str, Any]) -> list[Task]:
    """Return a task for each file of each index, for a shuffle to read beside the partitions."""
    return [Task(job.output, Unit(STAGE, f"{index.uri}#{file_index}", "", file_index),
                 {**settings, "index": index.number, "file": file})
            for index in job.indexes for file_index, file in enumerate(index.files)]


def lookup(indexes: Sequence[Index], partition: int, partitions: int, ids: pa.Array,
           columns: Sequence[str]) -> pa.Table:
    """Return the documents among `ids` that are in an index and belong to one partition.

    Args:
        indexes: indexes of earlier dumps.
        number: number of the partition.
        partitions: number of partitions.
        ids: ids to look up.
        columns: columns to return.
    """
    tables = []
    old = ids.filter(dedup.is_old(ids))
    for index in indexes if len(old) else ():
        for file in index.overlapping(partition, partitions):
            table = index.read(file, columns)
            tables.append(table.filter(pc.is_in(table["id"], value_set=old)))
    return pa.concat_tables(tables) if tables else pa.table({})


def write(job: Job, runner: Runner, tasks: Sequence[Task], done: Sequence[Published]) -> Finished:
    """Write the files of this run's index.

    Args:
        job: what the stage works on.
        runner: completes the units.
        tasks: tasks of near-deduplication.
        done: units of near-deduplication, with the documents that it dropped.
    """
    step = job.config.step("dedup_near")
    settings = parameters(step)
    todo = []
    for task, unit in zip(tasks, done, strict=True):
        key = unit_key(STAGE, settings=settings, version=VERSION,
                       inputs=[task.inputs["keys"].hash, *(stamp.hash for stamp in task.inputs["dropped"]),
                               *unit.content(), task.inputs["documents"].hash])
        dropped_files = [unit.files["verdicts"]] if "verdicts" in unit.files else []
        todo.append(Task(job.output, Unit(STAGE, task.unit.label, key, task.unit.number),
                         {**task.inputs, "gone": dropped_files, "parameters": settings}))
    return runner.complete(STAGE, todo, lambda missing: map_units(missing, _write_part))


def _write_part(task: Task) -> Published:
    table = load_keys(task.store, task.inputs, _KEYS)
    dropped_ids = [verdicts.decode(read_file(task.store, stamp), ["id"])["id"] for stamp in task.inputs["gone"]]
    kept = pa.array([True] * len(table), pa.bool_())
    for ids in dropped_ids:
        kept = pc.invert(pc.is_in(table["id"].combine_chunks(), value_set=ids.combine_chunks()))
    table = table.append_column("kept", kept)
    settings = task.inputs["parameters"]
    if settings["verify"] == "exact" or settings["doubt"]:
        sets = dict(sets_of(task, table["id"].combine_chunks(), settings["ngram"], settings["unit"]))
        column = pa.array([sets[name].astype("<u4").tobytes() for name in table["id"].to_pylist()], pa.large_binary())
        table = table.append_column("shingle_set", column)
    sink = io.BytesIO()
    write_ipc(sink, table)
    writer = task.writer()
    writer.shared("index", FOLDER, ".arrow", sink.getvalue())
    return writer.publish({"indexed": len(table), "kept": pc.sum(kept).as_py() or 0})


def commit(job: Job, units: Sequence[Published]) -> None:
    """Write the manifest, then remove files that an earlier recipe left in the folder."""
    step = job.config.step("dedup_near")
    files = [unit.files["index"] for unit in units]
    folder = job.store.child(FOLDER)
    manifest = {"version": FORMAT, "parameters": parameters(step),
                "documents": sum(unit.summary["indexed"] for unit in units),
                "kept": sum(unit.summary["kept"] for unit in units),
                "files": [[stamp.key.removeprefix(f"{FOLDER}/"), stamp.bytes, stamp.hash] for stamp in files]}
    folder.write_json(MANIFEST, manifest)
    known = {MANIFEST, *(entry[0] for entry in manifest["files"])}
    for file in list(folder.list()):
        if file.key not in known:
            folder.delete(file.key)
