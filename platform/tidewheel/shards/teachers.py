"""The most likely tokens of a teacher at each position of a set of packed sequences: a column beside the set.

The column has an Arrow file for each shard, memory-mapped and checked as shards are; `inference.teacher` makes them.
Each of its record batches has `ROWS` rows, the last one fewer. A row has for each of its L positions the K most likely
next tokens, and K + 1 log-probabilities: theirs, and that of all other tokens together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.cache import ShardFiles
from tidewheel.shards.columns import Head, again, checked_head, folder_of
from tidewheel.shards.format import token_type
from tidewheel.shards.manifest import PACKED, Manifest, ShardInfo
from tidewheel.shards.opened import OnDamage, OpenedSet, TeacherRows
from tidewheel.versions import Version

VERSION = Version("teacher_tokens")
COMMAND = "tidewheel teacher"
ROWS = 8
"""Rows of a record batch."""


def schema(sequence_length: int, top_k: int, token_dtype: str) -> pa.Schema:
    """Return the schema of a file.

    The columns are:
    - tokens: FixedSizeList(token_dtype, L K), position by position.
    - log_probabilities: FixedSizeList(float32, L (K + 1)).

    Args:
        sequence_length: L.
        top_k: K.
        token_dtype: of the set.
    """
    return pa.schema([pa.field("tokens", pa.list_(token_type(token_dtype), sequence_length * top_k)),
                      pa.field("log_probabilities", pa.list_(pa.float32(), sequence_length * (top_k + 1)))])


@dataclass(frozen=True)
class TeacherShard:
    """One memory-mapped file. Each batch is (tokens [n, L, K], log-probabilities fp32 [n, L, K + 1])."""

    batches: list[tuple[np.ndarray, np.ndarray]]


class TeacherTokens(OpenedSet[TeacherShard]):
    """Reads a column. Its shards and rows are numbered as those of the set. Safe to use from several threads.

    Attributes:
        head: the column's head.
    """

    KIND = PACKED
    head: Head

    @classmethod
    def of(cls, columns: str, uri: str, manifest: Manifest, cache: Path | None = None, *, verify: bool = False,
           on_damage: OnDamage | None = None) -> TeacherTokens:
        """Open the column of a set.

        Args:
            columns: folder of the columns of one teacher.
            uri: the set, for messages.
            manifest: its manifest.
            cache: see `OpenedSet.open`, also for the next two.
            verify: hash files in place too.
            on_damage: is told of files that were read again.

        Raises:
            ShardError: there is no complete column of this set.
        """
        store = storage.store(folder_of(columns, manifest))
        head = head_of(columns, uri, manifest)
        files = tuple(ShardInfo(file.key, info.rows, info.tokens, file.bytes, file.hash)
                      for file, info in zip(head.files, manifest.shards))
        opened = cls(store, dataclasses.replace(manifest, shards=files), ShardFiles(store, cache), verify=verify,
                     on_damage=on_damage)
        opened.head = head
        return opened

    def read(self, shards: np.ndarray, rows: np.ndarray) -> TeacherRows:
        """Return what the teacher says of row `rows[i]` of shard number `shards[i]` for each i.

        Args:
            shards: indices of shards, int64 [B].
            rows: indices of rows in their shards, int64 [B].

        Raises:
            ShardError: a file is missing or damaged.
        """
        found = []
        for index, row in zip(shards.tolist(), rows.tolist()):
            tokens, log_probabilities = self.shard(index).batches[row // ROWS]
            found.append((tokens[row % ROWS], log_probabilities[row % ROWS]))
        chosen = TeacherRows(np.stack([tokens for tokens, _ in found]), np.stack([values for _, values in found]))
        if int(chosen.tokens.max()) >= self.head.vocabulary_size:
            raise self._damaged(int(shards[0]), f"a token is outside the vocabulary of {self.head.vocabulary_size}")
        return chosen

    def _opened(self, path: Path, index: int) -> TeacherShard:
        info, head, length = self.manifest.shards[index], self.head, self.manifest.sequence_length
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if not reader.schema.equals(schema(length, head.top_k, self.manifest.token_dtype)):
                raise self._damaged(index, "the columns are not those of column.json")
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(index, f"not a readable file ({str(error).splitlines()[0]})") from None
        sizes = [batch.num_rows for batch in batches]
        if sum(sizes) != info.rows or any(size != ROWS for size in sizes[:-1]) or max(sizes, default=0) > ROWS \
                or any(column.null_count for batch in batches for column in batch.columns):
            raise self._damaged(index, f"the rows are not the {info.rows} of the shard")
        return TeacherShard([(batch.column(0).values.to_numpy().reshape(-1, length, head.top_k),
                              batch.column(1).values.to_numpy().reshape(-1, length, head.top_k + 1))
                             for batch in batches])

    def _damaged(self, index: int, what: str) -> ShardError:
        return ShardError(what, where=self.store.at(self.manifest.shards[index].name),
                          fix=f"delete the file, then {again(f'{COMMAND} {self.head.model}', 'SET')}")


def head_of(columns: str, uri: str, manifest: Manifest) -> Head:
    """Return the head of the column of a set.

    Args:
        columns: folder of the columns of one teacher.
        uri: the set.
        manifest: its manifest.

    Raises:
        ShardError: there is no complete column of this set.
    """
    store = storage.store(folder_of(columns, manifest))
    return checked_head(store, uri, manifest, VERSION, "tokens of a teacher", f"{COMMAND} MODEL")
