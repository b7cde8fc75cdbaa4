"""Stage 1: read source files, or ranges of large ones, into valid documents with their hashes.

Bad records go to quarantine. The same pass applies the leading filters. Memory is bounded by the size of a batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from tidewheel.data import document, quarantine, readers, verdicts, warm_up
from tidewheel.data.config import FilterStep, PipelineConfig, ReadConfig
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.quarantine import Bad, bad_record
from tidewheel.data.read_config import bound, received
from tidewheel.data.reader import Reader, identities, reader_of, version_of
from tidewheel.data.readers import Record, UnreadableFile, code, sniff
from tidewheel.data.stage import Published, Unit, UnitWriter, counts, ipc_stream, unit_key
from tidewheel.data.stages import by_source, empty, filters, keys
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.outcomes import VERSION as FILTERING
from tidewheel.data.stages.outcomes import Group, Outcomes, grouped, groups
from tidewheel.data.stages.sources import SourceFile
from tidewheel.errors import InputError
from tidewheel.storage import store
from tidewheel.versions import Version

STAGE = "ingest"
FILTER = "filter"
"""Stage under which the leading filters are reported."""
BATCH_DOCUMENTS = 2048
BATCH_CHARACTERS = 8 << 20
_SAMPLE_SALT = 0x5A3B1E
"""Makes the sample independent of partitions and of the validation split."""
VERSION = Version("ingest", uses=(document.VERSION, quarantine.VERSION, keys.VERSION, by_source.VERSION))


def schema(num_permutations: int) -> pa.Schema:
    """Return the schema of a unit's documents: the document, its position in the file, and its key columns.

    With `num_permutations` 0 there are no columns for signatures.
    """
    fields = [*DOCUMENT_SCHEMA, pa.field("line", pa.int64()), pa.field("offset", pa.int64()),
              pa.field("priority", pa.int32()), pa.field("quality", pa.float32()), pa.field("length", pa.int64()),
              pa.field("hash_hi", pa.uint64()), pa.field("hash_lo", pa.uint64())]
    if num_permutations:
        fields += [pa.field("shingles", pa.int32()), pa.field("signature", pa.binary(4 * num_permutations))]
    return pa.schema(fields)


def leading_filters(config: PipelineConfig) -> list[FilterStep]:
    """Return the filter steps before the first step that compares documents."""
    leading = itertools.takewhile(lambda step: step.filter is not None, config.steps)
    return [step.filter for step in leading if step.filter is not None]


def tasks(job: Job) -> list[Task]:
    """Return a task for each source file or range. Its key covers neither the patterns nor the other files."""
    read = job.config.read.decisive()
    for name in ("paths", "split", "subset", "unit_bytes", "limit"):
        read.pop(name, None)
    settings = {
        "read": read,
        "filters": grouped(leading_filters(job.config), job.identity),
        "minhash": keys.minhash_settings(job.config),
    }
    leading = [filter for step in leading_filters(job.config) for filter in step.filters]
    filtering = (FILTERING, *filters.versions(leading)) if leading else ()
    bound_filters = grouped(leading_filters(job.config), job.bound)
    todo: list[Task] = []
    for file in job.files:
        reader = reader_of(file.shape.format, job.config.read)
        version = VERSION.using(version_of(reader), *filtering)
        packages = identities(reader, job.config.read)
        reading = bound(job.config.read, read, reader)
        for span in file.ranges or [None]:
            inputs = [file.name, file.fingerprint, *packages, *(map(str, span or ()))]
            inputs += [] if file.limit is None else [f"limit {file.limit}"]
            unit = Unit(STAGE, _label(file, span, reader),
                        unit_key(STAGE, settings=settings, version=version, inputs=inputs), len(todo))
            todo.append(Task(job.output, unit, {
                **settings, "read": reading, "filters": bound_filters, "root": file.root, "key": file.key,
                "name": file.name, "fingerprint": file.fingerprint, "span": span,
                "shape": sniff.values_of(file.shape), "limit": file.limit,
                "members": [(member.key, member.name) for member in file.members]}))
    return todo


def _label(file: SourceFile, span: tuple[int, int] | None, reader: Reader) -> str:
    if span is None:
        return file.name
    return f"{file.name}[{reader.RANGES} {span[0]}-{span[1] - 1}]"


def run(job: Job, runner: Runner) -> Finished:
    """Read every file.

    Raises:
        InputError: too large a share of the records is bad.
    """
    def execute(missing: list[Task]) -> Iterator[Published]:
        if not warm_up.is_warm():  # the package has no machine code for this processor; workers would each compile it
            runner.report(STAGE, 0, len(missing), "compiling text kernels for this processor, a minute or two, once")
            warm_up.warm_up()
        return map_units(missing, ingest_file)

    done = runner.complete(STAGE, tasks(job), execute)
    check_share(done.units, job)
    return done


def check_share(units: Sequence[Published], job: Job) -> None:
    """Check the share of bad records.

    Raises:
        InputError: more than the configured share of all records is bad; the error names the worst file.
    """
    total = sum(unit.summary["records"] for unit in units)
    bad = sum(unit.summary["bad"] for unit in units)
    if bad <= job.config.max_bad_fraction * total:
        return
    if (error := empty.only_empty_files(units, job)) is not None:
        raise error
    counted = {unit.summary["name"]: Counter[str]() for unit in units}  # the ranges of a file together
    for unit in units:
        counted[unit.summary["name"]].update(records=unit.summary["records"], bad=unit.summary["bad"])
    worst = max(counted, key=lambda name: (counted[name]["bad"], name))
    by_reason = counts((unit for unit in units if unit.summary["name"] == worst), "quarantined")
    reasons = sorted(by_reason.items(), key=lambda item: (-item[1], item[0]))
    frequent = ", ".join(f"{reason} {count} ({quarantine.REASONS[reason]})" for reason, count in reasons[:3])
    raise InputError(
        f"{bad} of {total} records cannot be used, more than the allowed share of {job.config.max_bad_fraction:g}; "
        f"most of them, {counted[worst]['bad']} of {counted[worst]['records']}, in this file: {frequent}", where=worst,
        fix=f"see {job.output}/quarantine for each one with its line; correct the file or read.text and read.id, "
            "or raise max_bad_fraction")


@dataclass
class Tally:
    """Counts of a file so far."""

    records: int = 0
    bad: list[Bad] = field(default_factory=list)
    kept: int = 0
    kept_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    read: list[by_source.BySource] = field(default_factory=list)
    left: list[by_source.BySource] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)


def ingest_file(task: Task) -> Published:
    """Publish the unit of one source file or range.

    Its files are the documents (`schema`), and verdicts, annotations and quarantine if there are any.
    """
    writer = task.writer()
    tally = Tally()
    try:
        _write_documents(task, writer, tally)
    except UnreadableFile as error:
        tally = _quarantined_file(task, "unreadable_file", max(tally.records, 1), str(error))
        _write_no_documents(task, writer)
    if not tally.records and _is_empty(task):
        tally = _quarantined_file(task, "empty_file", 1, "")
    judged = tally.outcomes.verdicts()
    if len(judged):
        writer.shared("verdicts", f"verdicts/{FILTER}", ".parquet", verdicts.encode(judged))
    tally.outcomes.write_annotations(writer, FILTER)
    if tally.bad:
        writer.shared("quarantine", "quarantine", ".jsonl", quarantine.encode(tally.bad))
    quarantined = quarantine.count(tally.bad)
    num_removed = tally.outcomes.dropped + sum(quarantined.values())
    assert tally.records == tally.kept + num_removed, f"{task.unit.label}: counts differ"
    summary = {
        "name": task.inputs["name"], "records": tally.records, "bad": sum(quarantined.values()),
        "quarantined": quarantined, **({"skipped": dict(sorted(tally.skipped.items()))} if tally.skipped else {}),
        "documents": tally.kept, "bytes": tally.kept_bytes,
        "dropped": verdicts.counts(judged), "edits": verdicts.counts(judged, verdicts.EDIT),
        "samples": verdicts.samples(judged, tally.outcomes.samples_of()),
        "read": by_source.merge(tally.read), "left": by_source.merge(tally.left), **tally.outcomes.summary()}
    return writer.publish(summary, tally.outcomes.costs)


def _is_empty(task: Task) -> bool:
    """Return whether the file has no record at all; only the unit with the beginning of the file returns True."""
    span = task.inputs["span"]
    if task.inputs["read"].get("sample") is not None or task.inputs["members"]:  # all records may have been skipped
        return False
    if span is None:
        return True
    config = received(task.inputs["read"])
    return span[0] == 0 and readers.is_empty(store(task.inputs["root"]), task.inputs["key"], config,
                                              sniff.shape_from(task.inputs["shape"]))


def _quarantined_file(task: Task, reason: str, records: int, detail: str) -> Tally:
    """Return the counts of a file that goes to quarantine as a whole."""
    row = bad_record(task.inputs["name"], 0, 0, reason, b"", detail)
    row = Bad(**{**row.__dict__, "hash": task.inputs["fingerprint"], "records": records})
    return Tally(records=records, bad=[row])


def _write_documents(task: Task, writer: UnitWriter, tally: Tally) -> None:
    inputs = task.inputs
    minhash = inputs["minhash"]
    target = schema(minhash["num_permutations"] if minhash else 0)
    filter_groups = groups(inputs["filters"])
    config = received(inputs["read"])
    with writer.store.writer(task.unit.file_key("documents")) as sink:
        with ipc_stream(sink, target) as stream:
            for records in batches(task, config, tally):
                table = _keep(records, config, filter_groups, tally)
                if len(table):
                    stream.write_table(_hashed(table, minhash, target), max_chunksize=BATCH_DOCUMENTS)
    writer.add("documents", sink.stamp)


def _write_no_documents(task: Task, writer: UnitWriter) -> None:
    minhash = task.inputs["minhash"]
    target = schema(minhash["num_permutations"] if minhash else 0)
    with writer.store.writer(task.unit.file_key("documents")) as sink, ipc_stream(sink, target):
        pass
    writer.add("documents", sink.stamp)


def batches(task: Task, config: ReadConfig, tally: Tally) -> Iterator[list[Record]]:
    """Yield the documents of one file or range in batches, and count other records in `tally`.

    Args:
        task: the file or range.
        config: settings of `read`.
        tally: counts of the file.
    """
    root = store(task.inputs["root"])
    name = task.inputs["name"]
    batch: list[Record] = []
    characters = 0
    span = task.inputs["span"]
    shape = sniff.shape_from(task.inputs["shape"])
    sampled = _sampler(config)
    limit = task.inputs["limit"]
    taken = 0
    records: Iterator[Record | Bad | code.Skipped] = (
        readers.read_bundle(root, task.inputs["members"], config, shape) if task.inputs["members"] else
        readers.read_records(root, task.inputs["key"], config, name=name, span=span and tuple(span), shape=shape))
    for record in records:
        if isinstance(record, code.Skipped):
            tally.skipped[record.reason] += 1
            continue
        if not sampled(record):
            continue
        tally.records += record.records if isinstance(record, Bad) else 1
        if isinstance(record, Bad):
            tally.bad.append(record)
            continue
        batch.append(record)
        taken += 1
        characters += len(record.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
        if taken == limit:
            break
    if batch:
        yield batch


def _sampler(config: ReadConfig) -> Callable[[Record | Bad], bool]:
    """Return a function that tells whether a record is in the sample.

    Documents are sampled by their id, bad records by their position, so that their share stays the same.
    """
    if config.sample is None:
        return lambda record: True
    below = int(config.sample * (1 << 64))

    def sampled(record: Record | Bad) -> bool:
        name = f"{record.file}:{record.offset}" if isinstance(record, Bad) else record.id
        return xxhash.xxh3_64_intdigest(name.encode(), _SAMPLE_SALT) < below

    return sampled


def _keep(records: list[Record], config: ReadConfig, filter_groups: list[Group], tally: Tally) -> pa.Table:
    """Return the documents that pass the filters; record the verdicts on the others in `tally`."""
    texts = pa.array([record.text for record in records], pa.large_string())
    sources = [record.source for record in records]
    table = pa.table({
        "id": pa.array([record.id for record in records], pa.string()), "text": texts,
        "source": pa.array(sources, pa.string()), "meta": pa.array([record.meta for record in records], pa.string()),
        "line": pa.array([record.line for record in records], pa.int64()),
        "offset": pa.array([record.offset for record in records], pa.int64()),
        "priority": pa.array([config.priority.get(source, 0) for source in sources], pa.int32()),
        "quality": pa.array(np.zeros(len(records), np.float32)),
    })
    tally.read.append(by_source.tally(table["source"], keys.lengths(texts)))
    if filter_groups:
        passed = tally.outcomes.apply(filter_groups, table)
        table = passed.table
        if passed.quality is not None:
            table = table.set_column(table.schema.get_field_index("quality"), "quality",
                                     pa.array(passed.quality, pa.float32()))
    tally.kept += len(table)
    tally.kept_bytes += int(pa.compute.sum(keys.lengths(table["text"])).as_py() or 0)
    tally.left.append(by_source.tally(table["source"], keys.lengths(table["text"])))
    return table


def _hashed(table: pa.Table, minhash: dict[str, Any] | None, target: pa.Schema) -> pa.Table:
    for name, values in keys.columns(table["text"], minhash).items():
        table = table.append_column(name, values)
    return table.select(target.names).cast(target)
