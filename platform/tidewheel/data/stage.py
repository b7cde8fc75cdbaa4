"""Durable units: the work of a stage, cut so that each piece is done once, published whole, and found when done.

A unit's key is a hash of everything its output follows from: the content of its input, the settings of its stage that
differ from their defaults, and the versions of the parts that do the work. Its files are written first; its manifest,
`stages/<stage>/units/<key>.json`, written last, publishes it. Files are never changed afterwards: those
that live in folders shared between units are named by their content.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from blake3 import blake3

from tidewheel.errors import StorageError
from tidewheel.storage import Stamp, Store, content_hash, is_remote, store
from tidewheel.versions import Version

_PARALLEL_LOOKUPS = 16


@dataclass(frozen=True)
class Unit:
    """One piece of a stage's work.

    Args:
        stage: name of the stage, a folder below `stages/`.
        label: what people call it: a file, or "part-00003".
        key: 32 hex digits, from `unit_key`.
        number: place among the units of its stage.
    """

    stage: str
    label: str
    key: str
    number: int = 0

    @property
    def manifest_key(self) -> str:
        """Where its manifest is, below the output."""
        return f"stages/{self.stage}/units/{self.key}.json"

    def file_key(self, name: str) -> str:
        """Where a file of its own is, below the output."""
        return f"stages/{self.stage}/units/{self.key}/{name}"


class Cost(NamedTuple):
    """What a filter took.

    Args:
        documents: that it judged.
        seconds: of one core, about.
    """

    documents: int
    seconds: float

    def plus(self, other: Cost) -> Cost:
        """Return the sum of both."""
        return Cost(self.documents + other.documents, self.seconds + other.seconds)


def summed(several: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    """Return the costs of several units together, by filter."""
    total: dict[str, Cost] = {}
    for costs in several:
        for name, cost in costs.items():
            total[name] = total.get(name, Cost(0, 0.0)).plus(cost)
    return total


@dataclass(frozen=True)
class Published:
    """A finished unit: its files by name, and what it counted (JSON values)."""

    unit: Unit
    files: Mapping[str, Stamp]
    summary: Mapping[str, Any]
    costs: Mapping[str, Cost] = field(default_factory=dict, compare=False)
    """Of the filters that were applied, when this run did the unit. Not published: it is another one each time."""

    def content(self) -> list[str]:
        """Hashes of its files, for the keys of units downstream: equal content, equal keys."""
        return [f"{name}={stamp.hash}" for name, stamp in sorted(self.files.items())]

    def to_json(self) -> str:
        """Canonical JSON with its own hash in it."""
        body = {"stage": self.unit.stage, "label": self.unit.label, "key": self.unit.key, "number": self.unit.number,
                "files": {name: [stamp.key, stamp.bytes, stamp.hash] for name, stamp in self.files.items()},
                "summary": dict(self.summary)}
        return json.dumps({**body, "hash": content_hash(_canonical(body))}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Published:
        """Reads what `to_json` wrote; ValueError when it is damaged."""
        body = json.loads(text)
        if not isinstance(body, dict) or body.pop("hash", None) != content_hash(_canonical(body)):
            raise ValueError("the manifest's hash does not fit its content")
        unit = Unit(body["stage"], body["label"], body["key"], body["number"])
        return cls(unit, {name: Stamp(*values) for name, values in body["files"].items()}, body["summary"])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


UNIT_FILES = Version("unit_files")
"""How tables are written in a unit's files, and what its manifest holds."""


def unit_key(stage: str, *, settings: Any, version: Version | None, inputs: Sequence[str]) -> str:
    """Return the key of a unit, 32 hex digits.

    Args:
        stage: name of the stage.
        settings: those that differ from their defaults, JSON values.
        version: of the part that does the work; None for what is taken as it is.
        inputs: identities of what it reads, in order.
    """
    numbers = version.numbers() | UNIT_FILES.numbers() if version else {}
    return blake3(_canonical([stage, settings, numbers, list(inputs)])).hexdigest()[:32]


def published(place: Store, unit: Unit, *, verify: bool = False) -> Published | None:
    """The unit as published, if it is there and intact: the manifest's own hash fits, and every file has its length.

    The content of files is checked against its hash where it is read (`read_table`, `read_file`), so
    that a second run of a finished pipeline does not read everything again; with `verify` it is, and checked here.
    """
    try:
        found = Published.from_json(place.read(unit.manifest_key))
        intact = all(place.size(stamp.key) == stamp.bytes and (not verify or place.hash(stamp.key) == stamp.hash)
                     for stamp in found.files.values())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, StorageError):
        return None  # half-written or damaged: do it again
    # label and number are today's: the same content may have another name or place than when it was published
    return Published(unit, found.files, found.summary) if intact and found.unit.key == unit.key else None


def counts(units: Iterable[Published], name: str) -> dict[str, int]:
    """Sum of the counts by reason that units keep in their summaries under `name`."""
    total: Counter[str] = Counter()
    for unit in units:
        total.update(unit.summary.get(name, {}))
    return dict(sorted(total.items()))


def lookup(place: Store, units: Sequence[Unit], *, verify: bool = False) -> dict[str, Published]:
    """The units among `units` that are published, by key; `verify`: with every byte as it was."""
    with ThreadPoolExecutor(_PARALLEL_LOOKUPS) as pool:
        found = pool.map(lambda unit: published(place, unit, verify=verify), units)
        return {entry.unit.key: entry for entry in found if entry is not None}


@dataclass
class UnitWriter:
    """Collects the files of one unit, then publishes it. Writing the same unit twice writes the same bytes.

    Args:
        output: URI of the pipeline's output.
        unit: the unit.
    """

    output: str
    unit: Unit
    files: dict[str, Stamp] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The pipeline's output."""
        return store(self.output)

    def file(self, name: str, data: bytes | memoryview) -> Stamp:
        """A file of the unit's own."""
        return self.add(name, self.store.write(self.unit.file_key(name), data))

    def table(self, name: str, table: pa.Table) -> Stamp:
        """An Arrow IPC file of the unit's own; read it with `read_table`."""
        with self.store.writer(self.unit.file_key(name)) as sink:
            write_ipc(sink, table)
        return self.add(name, sink.stamp)

    def shared(self, name: str, folder: str, suffix: str, data: bytes | memoryview) -> Stamp:
        """A file in a folder that several units write to, named by its content."""
        key = f"{folder}/{content_hash(data).removeprefix('blake3-')[:32]}{suffix}"
        return self.add(name, self.store.write(key, data))

    def add(self, name: str, stamp: Stamp) -> Stamp:
        """A file written elsewhere, its key relative to the pipeline's output."""
        self.files[name] = stamp
        return stamp

    def publish(self, summary: Mapping[str, Any], costs: Mapping[str, Cost] | None = None) -> Published:
        """Commit: write the manifest. `costs` go along to the driver."""
        done = Published(self.unit, dict(self.files), dict(summary), dict(costs or {}))
        self.store.write(self.unit.manifest_key, done.to_json().encode())
        return done


_IPC = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
_BATCH_ROWS = 8192


def write_ipc(sink: Any, table: pa.Table) -> None:
    """Write `table` to a binary sink as an Arrow IPC stream; equal rows give equal bytes, however they are chunked."""
    table = table.combine_chunks()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table, max_chunksize=_BATCH_ROWS)


def ipc_stream(sink: Any, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
    """A writer for tables that arrive piece by piece; read them back with `read_table` or `read_batches`."""
    return pa.ipc.new_stream(sink, schema, options=_IPC)


def read_file(place: Store, stamp: Stamp) -> bytes:
    """The bytes `stamp` tells of.

    Raises:
        StorageError: they are missing, or not what was written.
    """
    for _ in range(2 if is_remote(place.uri) else 1):  # what came over a network may only have come wrong
        try:
            data = place.read(stamp.key)
        except FileNotFoundError:
            break
        if content_hash(data) == stamp.hash:
            return data
    raise _damaged(place, stamp)


def read_table(place: Store, stamp: Stamp, columns: Sequence[str] | None = None) -> pa.Table:
    """An Arrow IPC stream as a table, its hash checked; StorageError as in `read_file`."""
    options = None
    data = read_file(place, stamp)
    if columns is not None:
        schema = pa.ipc.open_stream(io.BytesIO(data)).schema
        options = pa.ipc.IpcReadOptions(included_fields=sorted(schema.get_field_index(name) for name in columns))
    return pa.ipc.open_stream(pa.py_buffer(data), options=options).read_all()


def read_batches(place: Store, stamp: Stamp) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC stream, a few in memory at a time.

    The hash is checked as the bytes go by, so a damaged file fails at its end at the latest.
    """
    with place.open(stamp.key) as stream:
        hashing = _HashingReader(stream)
        try:
            yield from pa.ipc.open_stream(pa.PythonFile(hashing, mode="r"))
        except MemoryError:  # no verdict on the file
            raise
        except (OSError, pa.ArrowException):
            raise _damaged(place, stamp) from None
        while hashing.read(1 << 20):
            pass
    if hashing.hash() != stamp.hash:
        raise _damaged(place, stamp)


class _HashingReader:
    def __init__(self, stream: Any) -> None:
        self._stream, self._digest = stream, blake3()
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data

    def hash(self) -> str:
        return "blake3-" + self._digest.hexdigest()

    def close(self) -> None:
        self.closed = True


def _damaged(place: Store, stamp: Stamp) -> StorageError:
    return StorageError("the content is not what was written", where=place.at(stamp.key),
                        mend="delete this file and run again: its unit is then made anew")
