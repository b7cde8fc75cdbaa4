"""Stage 1: one source file -> valid documents with their hashes; bad records to quarantine; leading filters applied.

One pass over a file does everything that looks at one document alone. Memory is bounded by a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidewheel.data import quarantine, verdicts
from tidewheel.data.config import PipelineConfig, ReadConfig
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.hashing import text_hashes
from tidewheel.data.quarantine import Bad, bad_record
from tidewheel.data.readers import Record, UnreadableFile, read_records
from tidewheel.data.stage import Published, Unit, UnitWriter, code_version, ipc_stream, unit_key
from tidewheel.data.stages import filters, histograms
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.errors import InputError
from tidewheel.storage import store

STAGE = "ingest"
BATCH_DOCUMENTS = 2048
BATCH_CHARACTERS = 8 << 20
_MODULES = ("tidewheel.data.readers", "tidewheel.data.quarantine", "tidewheel.data.document", "tidewheel.data.text",
            "tidewheel.data.hashing", "tidewheel.data.minhash", "tidewheel.data.verdicts", "tidewheel.data.stage",
            "tidewheel.data.stages.ingest", *filters.MODULES)


def schema(num_permutations: int) -> pa.Schema:
    """Rows of a unit: the document, where it was, what orders and compares it. No signature columns for 0."""
    fields = [*DOCUMENT_SCHEMA, pa.field("line", pa.int64()), pa.field("offset", pa.int64()),
              pa.field("priority", pa.int32()), pa.field("quality", pa.float32()), pa.field("length", pa.int64()),
              pa.field("hash_hi", pa.uint64()), pa.field("hash_lo", pa.uint64())]
    if num_permutations:
        fields += [pa.field("shingles", pa.int32()), pa.field("signature", pa.binary(4 * num_permutations))]
    return pa.schema(fields)


def leading_filters(config: PipelineConfig) -> list[tuple[str, Any]]:
    """(name, settings) of the filters before the first step that looks at more than one document."""
    rules: list[tuple[str, Any]] = []
    for step in config.steps:
        if step.kind != "filter":
            break
        rules += step.settings.rules()  # type: ignore[attr-defined]
    return rules


def tasks(job: Job) -> list[Task]:
    """One for each source file. The patterns are not part of the key, nor is what other files hold."""
    near = job.config.step("dedup_near")
    read = job.config.read.canonical()
    read.pop("paths")
    settings = {
        "read": read,
        "filters": [[name, rule.canonical()] for name, rule in leading_filters(job.config)],
        "minhash": near and {"ngram": near.ngram, "num_permutations": near.num_permutations, "seed": near.seed},
    }
    code = code_version(*_MODULES)
    return [
        Task(job.output, Unit(STAGE, file.name, unit_key(STAGE, settings=settings, code=code,
                                                         inputs=[file.name, file.fingerprint]), number),
             {**settings, "root": file.root, "key": file.key, "name": file.name, "fingerprint": file.fingerprint})
        for number, file in enumerate(job.files)
    ]


def run(job: Job, runner: Runner) -> Finished:
    """Every file, read.

    Raises:
        InputError: too large a share of the records is bad.
    """
    done = runner.complete(STAGE, tasks(job), lambda missing: map_units(missing, ingest_file))
    check_share([unit.summary for unit in done.units], job)
    return done


def check_share(summaries: list[Any], job: Job) -> None:
    """InputError, naming the worst file, when more than the configured share of all records is bad."""
    total = sum(summary["records"] for summary in summaries)
    bad = sum(summary["bad"] for summary in summaries)
    if bad <= job.config.max_bad_fraction * total:
        return
    worst = max(summaries, key=lambda summary: (summary["bad"], summary["name"]))
    reasons = sorted(worst["quarantined"].items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{reason} {count} ({quarantine.REASONS[reason]})" for reason, count in reasons[:3])
    raise InputError(
        f"{bad} of {total} records cannot be used, more than the allowed share of {job.config.max_bad_fraction:g}; "
        f"most of them, {worst['bad']} of {worst['records']}, in this file: {told}", where=worst["name"],
        mend=f"see {job.output}/quarantine for each one with its line; correct the file or read.text and read.id, "
             "or raise max_bad_fraction")


@dataclass
class _Tally:
    """What has been counted of a file so far."""

    records: int = 0
    bad: list[Bad] = field(default_factory=list)
    kept: int = 0
    kept_bytes: int = 0
    drops: list[pa.Table] = field(default_factory=list)
    heads: list[pa.Table] = field(default_factory=list)
    statistics: list[dict[str, histograms.Histogram]] = field(default_factory=list)


def ingest_file(task: Task) -> Published:
    """The unit of one source file. Files: documents (`schema`), and verdicts and quarantine where there are any."""
    writer, tally = task.writer(), _Tally()
    try:
        _documents(task, writer, tally)
    except UnreadableFile as error:
        tally = _aside(task, "unreadable_file", max(tally.records, 1), str(error))
        _no_documents(task, writer)
    if not tally.records:
        tally = _aside(task, "empty_file", 1, "")
    dropped = pa.concat_tables([verdicts.VERDICT_SCHEMA.empty_table(), *tally.drops])
    samples = verdicts.samples(dropped, pa.concat_tables(tally.heads)) if len(dropped) else {}
    if len(dropped):
        writer.shared("verdicts", "verdicts/filter", ".parquet", verdicts.encode(dropped.sort_by("id")))
    if tally.bad:
        writer.shared("quarantine", "quarantine", ".jsonl", quarantine.encode(tally.bad))
    quarantined = quarantine.count(tally.bad)
    assert tally.records == tally.kept + len(dropped) + sum(quarantined.values()), f"{task.unit.label}: counts differ"
    return writer.publish({
        "name": task.inputs["name"], "records": tally.records, "bad": sum(quarantined.values()),
        "quarantined": quarantined, "documents": tally.kept, "bytes": tally.kept_bytes,
        "dropped": verdicts.counts(dropped), "samples": samples, "histograms": histograms.merge(tally.statistics)})


def _aside(task: Task, reason: str, records: int, detail: str) -> _Tally:
    row = bad_record(task.inputs["name"], 0, 0, reason, b"", detail)
    row = Bad(**{**row.__dict__, "hash": task.inputs["fingerprint"], "records": records})
    return _Tally(records=records, bad=[row])


def _documents(task: Task, writer: UnitWriter, tally: _Tally) -> None:
    inputs = task.inputs
    minhash = inputs["minhash"]
    target = schema(minhash["num_permutations"] if minhash else 0)
    rules = [(kind, filters.settings_of(kind, values)) for kind, values in inputs["filters"]]
    config = ReadConfig(paths=("-",), **inputs["read"])
    with writer.store.writer(task.unit.file_key("documents")) as sink:
        with ipc_stream(sink, target) as stream:
            for records in _batches(task, config, tally):
                table = _keep(records, config, rules, tally)
                if len(table):
                    stream.write_table(_hashed(table, minhash, target), max_chunksize=BATCH_DOCUMENTS)
    writer.add("documents", sink.stamp)


def _no_documents(task: Task, writer: UnitWriter) -> None:
    minhash = task.inputs["minhash"]
    target = schema(minhash["num_permutations"] if minhash else 0)
    with writer.store.writer(task.unit.file_key("documents")) as sink, ipc_stream(sink, target):
        pass
    writer.add("documents", sink.stamp)


def _batches(task: Task, config: ReadConfig, tally: _Tally) -> Iterator[list[Record]]:
    place, name = store(task.inputs["root"]), task.inputs["name"]
    batch: list[Record] = []
    characters = 0
    for record in read_records(place, task.inputs["key"], config, name=name):
        tally.records += 1
        if isinstance(record, Bad):
            tally.bad.append(record)
            continue
        batch.append(record)
        characters += len(record.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _keep(records: list[Record], config: ReadConfig, rules: list[tuple[str, Any]], tally: _Tally) -> pa.Table:
    """Columns of the documents that pass the filters; the others go to the tally."""
    texts = pa.array([record.text for record in records], pa.large_string())
    sources = [record.source for record in records]
    table = pa.table({
        "id": pa.array([record.id for record in records], pa.string()), "text": texts,
        "source": pa.array(sources, pa.string()), "meta": pa.array([record.meta for record in records], pa.string()),
        "line": pa.array([record.line for record in records], pa.int64()),
        "offset": pa.array([record.offset for record in records], pa.int64()),
        "priority": pa.array([config.priority.get(source, 0) for source in sources], pa.int32()),
        "quality": pa.array(np.zeros(len(records), np.float32)),
        "length": pa.compute.binary_length(texts).cast(pa.int64()),
    })
    if rules:
        reasons, statistics = filters.judge(rules, texts)
        tally.statistics.append(statistics)
        gone = reasons != ""
        if gone.any():
            dropped = table.filter(pa.array(gone))
            tally.drops.append(verdicts.drops(dropped["id"], reasons[gone].tolist()))
            tally.heads.append(dropped.select(["id"]).append_column(
                "head", pa.array([verdicts.head(text) for text in dropped["text"].to_pylist()], pa.string())))
            table = table.filter(pa.array(~gone))
    tally.kept += len(table)
    tally.kept_bytes += int(table["length"].to_numpy().sum())
    return table


def _hashed(table: pa.Table, minhash: dict[str, int] | None, target: pa.Schema) -> pa.Table:
    hashes = text_hashes(table["text"])
    table = table.append_column("hash_hi", pa.array(hashes[:, 0])).append_column("hash_lo", pa.array(hashes[:, 1]))
    if minhash:
        from tidewheel.data.minhash import minhash as signatures_of

        found = signatures_of(table["text"], ngram=minhash["ngram"], num_permutations=minhash["num_permutations"],
                              seed=minhash["seed"])
        raw = pa.FixedSizeBinaryArray.from_buffers(
            target.field("signature").type, len(table), [None, pa.py_buffer(found.signatures.astype("<u4").tobytes())])
        table = table.append_column("shingles", pa.array(found.shingles)).append_column("signature", raw)
    return table.cast(target)


def merged_counts(units: list[Published], name: str) -> dict[str, int]:
    """Sum of the counts by reason that units keep under `name`."""
    total: Counter[str] = Counter()
    for unit in units:
        total.update(unit.summary[name])
    return dict(sorted(total.items()))
