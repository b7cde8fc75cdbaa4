"""Read rows of a shard set as arrays from memory-mapped files."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.cache import CACHE_BYTES, ShardFiles
from tidewheel.shards.format import shard_schema
from tidewheel.shards.integrity import Integrity, fingerprint, problem_of
from tidewheel.shards.manifest import PACKED, REBUILD, Manifest, ShardInfo, read_manifest

logger = logging.getLogger(__name__)

OnDamage = Callable[[str, str], None]
OPEN_SHARDS = 1024
"""Number of memory maps held open; Linux allows a process 65,530 (vm.max_map_count)."""


@dataclass(frozen=True)
class Rows:
    """B packed sequences of L tokens."""

    tokens: np.ndarray
    """[B, L] in the set's token_dtype."""
    lengths: np.ndarray
    """[B] int32: number of real tokens; the rest is padding."""
    segment_ids: np.ndarray
    """[B, L] int32: index of the segment in its row, -1 in padding."""
    positions: np.ndarray
    """[B, L] int32: position in the segment, 0 in padding."""
    ids: list[str]
    """Sequence id of each row, "shardname:row"."""
    loss_mask: np.ndarray | None = None
    """[B, L] uint8: 1 for tokens to learn; None: the set has no mask."""


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
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0) if reader.num_record_batches == 1 else None
        if batch is not None:
            batch.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardError(f"not a readable shard ({str(error).splitlines()[0]})", where=where, fix=REBUILD) from None
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


class ShardSet:
    """A shard set opened for reading. Safe to use from several threads.

    Args:
        store: the set's folder.
        manifest: its manifest.
        files: local paths of its shards.
        verify: hash files in place too, see `shards.integrity`.
        on_damage: see `open`.
    """

    def __init__(self, store: storage.Store, manifest: Manifest, files: ShardFiles, *, verify: bool = False,
                 on_damage: OnDamage | None = None) -> None:
        self.store, self.manifest, self._files = store, manifest, files
        self._integrity, self._on_damage = Integrity(verify), on_damage
        self._counts = np.array([shard.rows for shard in manifest.shards], dtype=np.int64)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._suspect: set[int] = set()  # damage was seen: check the whole file before the next read
        self._lock = threading.Lock()

    @classmethod
    def open(cls, uri: str, cache: Path | None = None, *, cache_bytes: int = CACHE_BYTES, verify: bool = False,
             on_damage: OnDamage | None = None, manifest: Manifest | None = None) -> ShardSet:
        """Open the set at `uri`.

        A shard is opened when it is first read: memory-mapped in place, or copied from an object store into `cache`
        with its hash checked.

        Args:
            uri: the set.
            cache: folder of copies; default: a temporary one.
            cache_bytes: total size of the copies.
            verify: hash files in place too, see `shards.integrity`.
            on_damage: called with (where, what) by the reading thread when a shard had to be read again.
            manifest: the set's manifest, if it is already known.

        Raises:
            ShardError: there is no set, its manifest is damaged, or it is a preference set.
        """
        store = storage.store(uri)
        manifest = read_manifest(store) if manifest is None else manifest
        if manifest.kind != PACKED:
            raise ShardError(f"a set of {manifest.kind}: its rows are pairs, not packed sequences", where=store.uri,
                             fix="read it with tidewheel.shards.preferences.read_pairs")
        return cls(store, manifest, ShardFiles(store, cache, cache_bytes), verify=verify, on_damage=on_damage)

    def follow(self, manifest: Manifest) -> None:
        """Replace the manifest by one with the same shards and more after them."""
        if manifest is not self.manifest:
            with self._lock:
                self._counts = np.array([shard.rows for shard in manifest.shards], dtype=np.int64)
                self.manifest = manifest

    def shard(self, index: int) -> Shard:
        """Return shard number `index`, opened at its first use.

        Raises:
            ShardError: the shard is missing or damaged.
        """
        with self._lock:
            opened = self._open.get(index)
            if opened is not None:
                self._open.move_to_end(index)
                problem = self._integrity.problem(self.manifest.shards[index])
                if problem:
                    raise self._damaged(index, problem)
                return opened
        return self._load(index, anew=index in self._suspect)  # not under the lock: a download must not block others

    def _load(self, index: int, *, anew: bool = False) -> Shard:
        """Open a shard; with `anew`, get it from its origin and check its whole content."""
        info = self.manifest.shards[index]
        with self._files.opened(info) as (path, readable):
            before = fingerprint(readable)
            if anew and (problem := problem_of(readable, info)):
                raise self._damaged(index, f"{problem}; it was read twice")
            opened = open_shard(readable, info, self.manifest, self.store.at(info.name))
        with self._lock:
            if index not in self._open or anew:
                self._open[index] = opened
                self._suspect.discard(index)
                self._integrity.opened(info, path, before, hashed=anew or self._files.copies)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[index]

    def _read_again(self, indices: list[int], error: ShardError) -> None:
        """Discard these shards, one of which is damaged, and get them from their origin."""
        logger.info("reading again: %s", error)
        with self._lock:
            for index in indices:
                self._open.pop(index, None)
                self._suspect.add(index)
        for index in indices:
            self._load(index, anew=True)
        if self._on_damage is not None:
            self._on_damage(error.where, error.what)

    def settle(self) -> None:
        """Return once every shard read so far is known to be intact; read damaged ones again.

        Raises:
            ShardError: a shard is still damaged when it is read again.
        """
        names = self._integrity.unsettled()
        for index in [index for index, info in enumerate(self.manifest.shards) if info.name in names]:
            self._read_again([index], self._damaged(index, "the shard's content is not what its manifest says"))

    def close(self) -> None:
        """Stop hashing in the background."""
        self._integrity.close()

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Return row `rows[i]` of shard number `shards[i]` for each i. A damaged shard is read again first.

        Args:
            shards: indices of shards, int64 [B].
            rows: indices of rows in their shards, int64 [B].

        Raises:
            ShardError: a shard is missing or damaged.
            IndexError: there is no such shard or row.
        """
        shards, rows = np.asarray(shards, dtype=np.int64), np.asarray(rows, dtype=np.int64)
        self._check(shards, rows)
        try:
            return self._gather(shards, rows)
        except ShardError as error:
            self._read_again(np.unique(shards).tolist(), error)
            return self._gather(shards, rows)

    def lengths(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the number of real tokens of row `rows[i]` of shard number `shards[i]` for each i, int32 [B].

        Args:
            shards: see `rows`.
            rows: see `rows`.

        Raises:
            ShardError: a shard is missing or damaged.
            IndexError: there is no such shard or row.
        """
        self._check(shards, rows)
        lengths = np.empty(len(shards), dtype=np.int32)
        for index in np.unique(shards).tolist():
            in_shard = shards == index
            lengths[in_shard] = self.shard(index).lengths[rows[in_shard]]
        return lengths

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
        return Rows(tokens, lengths, segment_ids, positions, ids, mask)

    def _check(self, shards: np.ndarray, rows: np.ndarray) -> None:
        counts = self._counts
        if shards.shape != rows.shape or shards.ndim != 1:
            raise IndexError(f"shards and rows must be two equal lists, got {shards.shape} and {rows.shape}")
        if shards.size and (shards.min() < 0 or shards.max() >= len(counts) or rows.min() < 0
                            or np.any(rows >= counts[shards])):
            raise IndexError(f"no such row in a set of {len(counts)} shards, {self.manifest.rows} rows")

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

    def _damaged(self, index: int, what: str) -> ShardError:
        return ShardError(what, where=self.store.at(self.manifest.shards[index].name),
                          fix=f"`tidewheel shards verify {self.store.uri}` lists what is damaged; {REBUILD}")


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
