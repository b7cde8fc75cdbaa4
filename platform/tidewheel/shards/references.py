"""Log-probabilities of a preference set's answers under a reference model: a column beside the set, made once.

The column has a file of fp32 for each shard; `inference.reference` makes them. `shards.columns` has what all columns
share.
"""

from __future__ import annotations

import threading

import numpy as np

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.columns import Head, again, checked_head, folder_of
from tidewheel.shards.manifest import PARTS, Manifest
from tidewheel.storage import Store, content_hash
from tidewheel.versions import Version

VERSION = Version("reference_log_probabilities")
COMMAND = "tidewheel reference"


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
        option = " --mismatched" if parts > (1 if manifest.unpaired else PARTS) else ""
        head = checked_head(store, uri, manifest, VERSION, "log-probabilities", f"{COMMAND} MODEL", option)
        if head.parts < parts:
            raise ShardError("the log-probabilities lack those of mismatched answers, which this objective needs",
                             where=store.uri, fix=again(f"{COMMAND} {head.model}", uri, option))
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
        fix = again(f"{COMMAND} {self.head.model}", "SET")
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

