"""Log-probabilities of a preference set's answers under a reference model: a column beside the set, made once.

A folder holds the columns of one reference model, `FOLDER/<hash of the set>/`: a file of fp32 for each shard, named by
its content, and `column.json`, which is written last and so commits the column. `inference.reference` makes them.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

import numpy as np

from tidewheel import storage
from tidewheel.errors import ShardError, StorageError
from tidewheel.shards.manifest import Fields, Manifest
from tidewheel.storage import Stamp, Store, content_hash
from tidewheel.versions import Version

VERSION = Version("reference_log_probabilities")
HEAD = "column.json"
FORMAT = 1
SHOWN = 16
"""Hex digits of a digest that messages and folder names show."""


@dataclass(frozen=True)
class Head:
    """Content of column.json."""

    shards: str
    """Hash of the set (`Manifest.hash`)."""
    reference: str
    """Digest of the reference model: SHA-256 of its parameters (`checkpoint.digest`)."""
    model: str
    """URI of the checkpoint that it was read from, for information."""
    parts: int
    """Columns: chosen, rejected and, with 3, mismatched (`shards.pairs`)."""
    precision: str
    """Type of the matrix products."""
    version: int
    files: tuple[Stamp, ...]
    """One for each shard, in their order."""


def folder_of(reference: str, manifest: Manifest) -> str:
    """Return the folder of the column of a set.

    Args:
        reference: folder of the columns of one reference model.
        manifest: the set's manifest.
    """
    return storage.join(reference, manifest.hash.removeprefix("blake3-")[:32])


def write_head(store: Store, head: Head) -> None:
    """Publish a column. Call this last, once all its files are written."""
    store.write_json(HEAD, {"format": FORMAT, **asdict(head)})


def read_head(store: Store) -> Head | None:
    """Return the head of the column in a folder; None if it is not complete.

    Raises:
        ShardError: it is damaged, or of another format.
    """
    where = store.at(HEAD)
    try:
        fields = Fields(store.read_json(HEAD), where)
    except FileNotFoundError:
        return None
    except StorageError as error:
        raise ShardError(error.what, where=where, fix=_again("MODEL", "SET")) from None
    fields.one_of("format", (FORMAT,))
    files = tuple(Stamp(file.text("key"), file.number("bytes"), file.text("hash")) for file in fields.groups("files"))
    return Head(fields.text("shards"), fields.text("reference"), fields.text("model"),
                fields.number("parts", at_least=2, at_most=3), fields.text("precision"), fields.number("version"),
                files)


class Column:
    """Reads a column. Safe to use from several threads.

    Args:
        store: its folder.
        head: its head.
        manifest: of the set.
    """

    def __init__(self, store: Store, head: Head, manifest: Manifest) -> None:
        self.head = head
        self._store, self._manifest = store, manifest
        self._values: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, reference: str, uri: str, manifest: Manifest, parts: int) -> Column:
        """Open the column of a set.

        Args:
            reference: folder of the columns of one reference model.
            uri: the set, for messages.
            manifest: its manifest.
            parts: columns that are needed.

        Raises:
            ShardError: there is no complete column of this set, or it has too few columns.
        """
        store = storage.store(folder_of(reference, manifest))
        head = read_head(store)
        option = " --mismatched" if parts > 2 else ""
        if head is None:
            raise ShardError(f"no log-probabilities of the set {uri} under the reference model, or they are not "
                             "complete", where=store.uri, fix=_again("MODEL", uri, option))
        if head.shards != manifest.hash or len(head.files) != len(manifest.shards):
            raise ShardError(f"the log-probabilities are of another set than {uri}", where=store.uri,
                             fix=_again(head.model, uri, option))
        if head.version != VERSION.number:
            raise ShardError(f"the log-probabilities have version {head.version}, this release computes "
                             f"{VERSION.number}", where=store.uri, fix=_again(head.model, uri, option))
        if head.parts < parts:
            raise ShardError("the log-probabilities lack those of mismatched answers, which this objective needs",
                             where=store.uri, fix=_again(head.model, uri, option))
        return cls(store, head, manifest)

    def values(self, index: int) -> np.ndarray:
        """Return the log-probabilities of a shard's rows, fp32 [rows, parts], read at the first call.

        Raises:
            ShardError: the file is missing or damaged.
        """
        with self._lock:
            if index not in self._values:
                self._values[index] = self._read(index)
            return self._values[index]

    def _read(self, index: int) -> np.ndarray:
        file, rows = self.head.files[index], self._manifest.shards[index].rows
        fix = _again(self.head.model, "SET")
        try:
            data = self._store.read(file.key)
        except FileNotFoundError:
            raise ShardError("the file of log-probabilities is missing", where=self._store.at(file.key),
                             fix=fix) from None
        if content_hash(data) != file.hash or len(data) != rows * self.head.parts * 4:
            raise ShardError("the file of log-probabilities has changed", where=self._store.at(file.key), fix=fix)
        return np.frombuffer(data, dtype="<f4").reshape(rows, self.head.parts)


def as_bytes(values: np.ndarray) -> bytes:
    """Return the content of a shard's file: fp32 [rows, parts], little-endian, row by row."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def _again(model: str, uri: str, option: str = "") -> str:
    return f"make them: tidewheel reference {model} --data {uri} --output FOLDER{option}"
