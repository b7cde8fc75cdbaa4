"""Read rows of a shard set as arrays from memory-mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from tidewheel.errors import ShardError
from tidewheel.shards.format import only_batch, shard_schema
from tidewheel.shards.manifest import PACKED, REBUILD, Manifest, ShardInfo
from tidewheel.shards.opened import OnDamage as OnDamage
from tidewheel.shards.opened import OpenedSet
from tidewheel.shards.opened import Rows as Rows
from tidewheel.shards.teachers import TeacherTokens


@dataclass(frozen=True)
class Shard:
    """The columns of one memory-mapped shard of n rows with s segments in total. Nothing is copied."""

    tokens: np.ndarray
    """[n, L]."""
    lengths: np.ndarray
    """[n] int32."""
    segment_bounds: np.ndarray
    """[n + 1] int32: the segments of row r are segment_starts[segment_bounds[r]:segment_bounds[r + 1]]."""
    segment_starts: np.ndarray
    """[s] int32."""
    loss_mask: np.ndarray | None
    batch: pa.RecordBatch
    """All columns, as in `shards.format.shard_schema`."""


def open_shard(path: Path, info: ShardInfo, manifest: Manifest, where: str) -> Shard:
    """Memory-map a shard file and compare its columns and row count with the manifest, without reading its rows.

    Args:
        path: the file.
        info: the shard's entry in the manifest.
        manifest: the set's manifest.
        where: location for error messages.

    Raises:
        ShardError: it is not an Arrow file, or its columns or rows differ from the manifest.
    """
    batch = only_batch(path, where)
    expected = shard_schema(manifest.sequence_length, manifest.token_dtype, manifest.loss_mask)
    if batch is None or not batch.schema.equals(expected):
        raise ShardError("the shard's columns are not those of its manifest", where=where, fix=REBUILD)
    if batch.num_rows != info.rows or any(column.null_count for column in batch.columns):
        raise ShardError(f"the shard has {batch.num_rows} rows, its manifest says {info.rows}, none of them null",
                         where=where, fix=REBUILD)
    starts = batch.column("segment_starts")
    shape = (info.rows, manifest.sequence_length)
    mask = batch.column("loss_mask").values.to_numpy().reshape(shape) if manifest.loss_mask else None
    return Shard(tokens=batch.column("tokens").values.to_numpy().reshape(shape),
                 lengths=batch.column("length").to_numpy(), segment_bounds=starts.offsets.to_numpy(),
                 segment_starts=starts.values.to_numpy(), loss_mask=mask, batch=batch)


class ShardSet(OpenedSet[Shard]):
    """A set of packed sequences opened for reading. Safe to use from several threads.

    Attributes:
        teacher: a teacher's tokens; None: they are not read.
    """

    KIND = PACKED
    teacher: TeacherTokens | None = None

    def _opened(self, path: Path, index: int) -> Shard:
        info = self.manifest.shards[index]
        return open_shard(path, info, self.manifest, self.store.at(info.name))

    def reading(self, teacher: TeacherTokens | None) -> Self:
        """Choose whether rows have a teacher's tokens, and return the set."""
        self.teacher = teacher
        return self

    def settle(self) -> None:
        super().settle()
        if self.teacher is not None:
            self.teacher.settle()

    def close(self) -> None:
        super().close()
        if self.teacher is not None:
            self.teacher.close()

    def _lengths(self, shard: Shard) -> np.ndarray:
        return shard.lengths

    def _attention_pairs(self, shard: Shard, rows: np.ndarray) -> np.ndarray:
        first, end = shard.segment_bounds[rows].astype(np.int64), shard.segment_bounds[rows + 1].astype(np.int64)
        owner = np.repeat(np.arange(len(rows)), end - first)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(end - first) - (end - first), end - first) + first[owner]
        starts = shard.segment_starts[place].astype(np.int64)
        ends = np.where(place + 1 == end[owner], shard.lengths[rows].astype(np.int64)[owner],
                        shard.segment_starts[np.minimum(place + 1, len(shard.segment_starts) - 1)])
        sizes = ends - starts
        return np.bincount(owner, weights=sizes * (sizes + 1) // 2, minlength=len(rows)).astype(np.int64)

    def _gather(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        manifest, count = self.manifest, len(shards)
        shape = (count, manifest.sequence_length)
        tokens = np.empty(shape, dtype=manifest.token_dtype)
        lengths = np.empty(count, dtype=np.int32)
        marks = np.zeros(shape, dtype=bool)
        mask = np.empty(shape, dtype=np.uint8) if manifest.loss_mask else None
        for index in np.unique(shards).tolist():
            shard = self.shard(index)
            in_shard = np.flatnonzero(shards == index)
            requested = rows[in_shard]
            shard_tokens = shard.tokens[requested]
            tokens[in_shard] = shard_tokens
            lengths[in_shard] = shard.lengths[requested]
            if mask is not None and shard.loss_mask is not None:
                mask[in_shard] = shard.loss_mask[requested]
            self._mark(marks, index, shard, in_shard, requested)
            if len(in_shard) and int(shard_tokens.max()) >= manifest.vocabulary_size:
                raise self._damaged(index, f"a token is outside the vocabulary of {manifest.vocabulary_size}")
        segment_ids, positions = _segments_of(marks, lengths)
        ids = [f"{manifest.shards[shard].name}:{row}" for shard, row in zip(shards.tolist(), rows.tolist())]
        teacher = None if self.teacher is None else self.teacher.read(shards, rows)
        return Rows(tokens, lengths, segment_ids, positions, ids, mask, teacher=teacher)

    def _mark(self, marks: np.ndarray, index: int, shard: Shard, in_shard: np.ndarray, requested: np.ndarray) -> None:
        """Set `marks` [B, L] where segments begin, for the rows `requested` of a shard at the indices `chosen`."""
        first = shard.segment_bounds[requested].astype(np.int64)
        counts = shard.segment_bounds[requested + 1] - first
        lengths = shard.lengths[requested]
        if np.any(counts < 1) or first.min() < 0 or (first + counts).max() > len(shard.segment_starts) \
                or lengths.min() < 1 or lengths.max() > marks.shape[1]:
            raise self._damaged(index, "a row has no segment or an impossible length")
        owner = np.repeat(np.arange(len(requested)), counts)
        begin = np.cumsum(counts) - counts
        starts = shard.segment_starts[first[owner] + np.arange(len(owner)) - begin[owner]]
        if np.any(starts < 0) or np.any(starts >= lengths[owner]) or np.any(starts[begin] != 0):
            raise self._damaged(index, "a segment begins outside its row")
        marks[in_shard[owner], starts] = True


def _segments_of(marks: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (segment_ids, positions), int32 [B, L], from marks [B, L] of segments' starts; each row has one at 0."""
    count, length = marks.shape
    padded = np.flatnonzero(lengths < length)
    marks[padded, lengths[padded]] = True  # padding counts as one more segment here
    begins = np.flatnonzero(marks).astype(np.int32 if marks.size < 1 << 31 else np.int64)
    sizes = np.diff(begins, append=marks.size)
    firsts = np.flatnonzero(begins % length == 0)  # of each row
    numbers = np.arange(len(begins), dtype=np.int32) - np.repeat(firsts, np.diff(firsts, append=len(begins)))
    positions = np.arange(marks.size, dtype=begins.dtype) - np.repeat(begins, sizes)
    lasts = np.append(firsts[1:], len(begins))[padded] - 1
    numbers[lasts] = -1
    segment_ids = np.repeat(numbers.astype(np.int32), sizes).reshape(count, length)
    positions = positions.astype(np.int32, copy=False).reshape(count, length)
    for row in padded.tolist():
        positions[row, lengths[row]:] = 0
    return segment_ids, positions
