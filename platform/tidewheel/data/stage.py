"""Durable units: pieces of a stage's work that are done once, published as a whole, and found again when they are done.

A unit's key is a hash of everything that decides its output: the content of its input, the settings of its stage that
differ from their defaults, and the versions of the parts that do the work. The unit's files are written first. Its
manifest, `stages/<stage>/units/<key>.json`, is written last and publishes the unit. Files never change afterwards;
files in folders that units share are named by their content.
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
        label: name for people: a file, or "part-00003".
        key: 32 hex digits, from `unit_key`.
        number: position among the units of its stage.
    """

    stage: str
    label: str
    key: str
    number: int = 0

    @property
    def manifest_key(self) -> str:
        """Key of its manifest, below the output."""
        return f"stages/{self.stage}/units/{self.key}.json"

    def file_key(self, name: str) -> str:
        """Return the key of one of its own files, below the output."""
        return f"stages/{self.stage}/units/{self.key}/{name}"


class Cost(NamedTuple):
    """Cost of a filter.

    Args:
        documents: number of documents that it judged.
        seconds: approximate seconds of one core.
    """

    documents: int
    seconds: float

    def plus(self, other: Cost) -> Cost:
        """Return the sum of both."""
        return Cost(self.documents + other.documents, self.seconds + other.seconds)


def summed(several: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    """Return the total costs of several units, by filter."""
    total: dict[str, Cost] = {}
    for costs in several:
        for name, cost in costs.items():
            total[name] = total.get(name, Cost(0, 0.0)).plus(cost)
    return total


@dataclass(frozen=True)
class Published:
    """A finished unit.

    Args:
        unit: the unit.
        files: its files, by name.
        summary: its counts, as JSON values.
        costs: costs of its filters, if this run made the unit. They differ between runs, so they are not published.
    """

    unit: Unit
    files: Mapping[str, Stamp]
    summary: Mapping[str, Any]
    costs: Mapping[str, Cost] = field(default_factory=dict, compare=False)

    def content(self) -> list[str]:
        """Return the hashes of its files, for the keys of later units: equal content gives equal keys."""
        return [f"{name}={stamp.hash}" for name, stamp in sorted(self.files.items())]

    def to_json(self) -> str:
        """Return canonical JSON that contains its own hash."""
        body = {"stage": self.unit.stage, "label": self.unit.label, "key": self.unit.key, "number": self.unit.number,
                "files": {name: [stamp.key, stamp.bytes, stamp.hash] for name, stamp in self.files.items()},
                "summary": dict(self.summary)}
        return json.dumps({**body, "hash": content_hash(_canonical(body))}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Published:
        """Read the JSON that `to_json` wrote.

        Raises:
            ValueError: it is damaged.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or body.pop("hash", None) != content_hash(_canonical(body)):
            raise ValueError("the manifest's hash does not match its content")
        unit = Unit(body["stage"], body["label"], body["key"], body["number"])
        return cls(unit, {name: Stamp(*values) for name, values in body["files"].items()}, body["summary"])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


UNIT_FILES = Version("unit_files")
"""Version of the tables in a unit's files, and of its manifest."""


def unit_key(stage: str, *, settings: Any, version: Version | None, inputs: Sequence[str]) -> str:
    """Return the key of a unit, 32 hex digits.

    Args:
        stage: name of the stage.
        settings: settings that differ from their defaults, as JSON values.
        version: version of the part that does the work; None if the unit only copies its input.
        inputs: identities of its inputs, in order.
    """
    numbers = version.numbers() | UNIT_FILES.numbers() if version else {}
    return blake3(_canonical([stage, settings, numbers, list(inputs)])).hexdigest()[:32]


def published(output: Store, unit: Unit, *, verify: bool = False) -> Published | None:
    """Return a unit if it is published and intact: its manifest has the right hash, and each file the right length.

    Files are compared with their hashes when they are read (`read_table`, `read_file`), so that a second run of a
    finished pipeline need not read everything.

    Args:
        output: the pipeline's output.
        unit: the unit.
        verify: read every file now, and compare it with its hash.
    """
    try:
        stored = Published.from_json(output.read(unit.manifest_key))
        intact = all(output.size(stamp.key) == stamp.bytes and (not verify or output.hash(stamp.key) == stamp.hash)
                     for stamp in stored.files.values())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, StorageError):
        return None  # half-written or damaged: make it again
    # use the current label and number: the same content may have had another name or position before
    return Published(unit, stored.files, stored.summary) if intact and stored.unit.key == unit.key else None


def counts(units: Iterable[Published], name: str) -> dict[str, int]:
    """Return the sum of the counts by reason that units have in their summaries under `name`."""
    total: Counter[str] = Counter()
    for unit in units:
        total.update(unit.summary.get(name, {}))
    return dict(sorted(total.items()))


def lookup(output: Store, units: Sequence[Unit], *, verify: bool = False) -> dict[str, Published]:
    """Return the units that are published and intact, by key.

    Args:
        output: the pipeline's output.
        units: the units to look up.
        verify: read every file now, and compare it with its hash.
    """
    with ThreadPoolExecutor(_PARALLEL_LOOKUPS) as pool:
        entries = pool.map(lambda unit: published(output, unit, verify=verify), units)
        return {entry.unit.key: entry for entry in entries if entry is not None}


@dataclass
class UnitWriter:
    """Writer of one unit: it writes the unit's files, then publishes it. Writing a unit twice gives the same bytes.

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
        """Write a file of the unit's own."""
        return self.add(name, self.store.write(self.unit.file_key(name), data))

    def table(self, name: str, table: pa.Table) -> Stamp:
        """Write an Arrow IPC file of the unit's own; read it with `read_table`."""
        with self.store.writer(self.unit.file_key(name)) as sink:
            write_ipc(sink, table)
        return self.add(name, sink.stamp)

    def shared(self, name: str, folder: str, suffix: str, data: bytes | memoryview) -> Stamp:
        """Write a file to a folder that units share; its name is the hash of its content.

        Args:
            name: name of the file in the unit.
            folder: the folder, below the output.
            suffix: ending of the file's name.
            data: the content.
        """
        key = f"{folder}/{content_hash(data).removeprefix('blake3-')[:32]}{suffix}"
        return self.add(name, self.store.write(key, data))

    def add(self, name: str, stamp: Stamp) -> Stamp:
        """Add a file that is already written; its key is relative to the pipeline's output."""
        self.files[name] = stamp
        return stamp

    def publish(self, summary: Mapping[str, Any], costs: Mapping[str, Cost] | None = None) -> Published:
        """Write the manifest, which publishes the unit. `costs` are only passed on to the driver."""
        done = Published(self.unit, dict(self.files), dict(summary), dict(costs or {}))
        self.store.write(self.unit.manifest_key, done.to_json().encode())
        return done


_IPC = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
_BATCH_ROWS = 8192


def write_ipc(sink: Any, table: pa.Table) -> None:
    """Write a table to a binary sink as an Arrow IPC stream; equal rows give equal bytes for any chunking."""
    table = table.combine_chunks()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table, max_chunksize=_BATCH_ROWS)


def ipc_stream(sink: Any, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
    """Return a writer for tables that arrive one by one; `read_table` or `read_batches` reads them."""
    return pa.ipc.new_stream(sink, schema, options=_IPC)


def read_file(output: Store, stamp: Stamp) -> bytes:
    """Return the content of a file.

    Raises:
        StorageError: the file is missing, or its content has changed.
    """
    for _ in range(2 if is_remote(output.uri) else 1):  # the content may be damaged only in transit
        try:
            data = output.read(stamp.key)
        except FileNotFoundError:
            break
        if content_hash(data) == stamp.hash:
            return data
    raise _damaged(output, stamp)


def read_table(output: Store, stamp: Stamp, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in an Arrow IPC stream.

    Args:
        output: the pipeline's output.
        stamp: the file.
        columns: names of the columns; None for all.

    Raises:
        StorageError: the file is missing, or its content has changed.
    """
    options = None
    data = read_file(output, stamp)
    if columns is not None:
        schema = pa.ipc.open_stream(io.BytesIO(data)).schema
        options = pa.ipc.IpcReadOptions(included_fields=sorted(schema.get_field_index(name) for name in columns))
    return pa.ipc.open_stream(pa.py_buffer(data), options=options).read_all()


def read_batches(output: Store, stamp: Stamp) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow IPC stream, with a few in memory at a time.

    The hash is computed while reading, so a damaged file fails at its end at the latest.

    Raises:
        StorageError: the content of the file has changed.
    """
    with output.open(stamp.key) as stream:
        hashing = _HashingReader(stream)
        try:
            yield from pa.ipc.open_stream(pa.PythonFile(hashing, mode="r"))
        except MemoryError:  # the file itself may be intact
            raise
        except (OSError, pa.ArrowException):
            raise _damaged(output, stamp) from None
        while hashing.read(1 << 20):
            pass
    if hashing.hash() != stamp.hash:
        raise _damaged(output, stamp)


class _HashingReader:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = blake3()
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data

    def hash(self) -> str:
        return "blake3-" + self._digest.hexdigest()

    def close(self) -> None:
        self.closed = True


def _damaged(output: Store, stamp: Stamp) -> StorageError:
    return StorageError("the content is not what was written", where=output.at(stamp.key),
                        fix="delete this file and run again, which makes its unit again")
