"""Rows of a shard set as arrays, straight from memory-mapped files."""

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
"""Maps held open; Linux allows a process 65,530 (vm.max_map_count)."""


@dataclass(frozen=True)
class Rows:
    """B packed sequences of L tokens."""

    tokens: np.ndarray
    """[B, L], token_dtype of the set."""
    lengths: np.ndarray
    """[B] int32: real tokens, the rest is padding."""
    segment_ids: np.ndarray
    """[B, L] int32: number of the segment in its row, -1 in padding."""
    positions: np.ndarray
    """[B, L] int32: position in the segment, 0 in padding."""
    ids: list[str]
    """"shardname:row" of each."""
    loss_mask: np.ndarray | None = None
    """[B, L] uint8, if the set has one."""


@dataclass(frozen=True)
class Shard:
    """The columns of one memory-mapped shard, without a copy; n rows with s segments in all."""

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
    """Memory-map a shard file and check that it is what the manifest says, as far as that takes no reading.

    Raises:
        ShardError: not an Arrow file, or other columns or rows than the manifest says; names `where`.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0) if reader.num_record_batches == 1 else None
        if batch is not None:
            batch.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardError(f"not a readable shard ({str(error).splitlines()[0]})", where=where, mend=REBUILD) from None
    expected = shard_schema(manifest.sequence_length, manifest.token_dtype, manifest.loss_mask)
    if batch is None or not batch.schema.equals(expected):
        raise ShardError("the shard's columns are not those of its manifest", where=where, mend=REBUILD)
    if batch.num_rows != info.rows or any(column.null_count for column in batch.columns):
        raise ShardError(f"the shard has {batch.num_rows} rows, its manifest says {info.rows}, none of them null",
                         where=where, mend=REBUILD)
    starts = batch.column("segment_starts")
    shape = (info.rows, manifest.sequence_length)
    mask = batch.column("loss_mask").values.to_numpy().reshape(shape) if manifest.loss_mask else None
    return Shard(tokens=batch.column("tokens").values.to_numpy().reshape(shape),
                 lengths=batch.column("length").to_numpy(), segment_bounds=starts.offsets.to_numpy(),
                 segment_starts=starts.values.to_numpy(), loss_mask=mask, batch=batch)


class ShardSet:
    """A shard set opened for reading; safe for several threads."""

    def __init__(self, store: storage.Store, manifest: Manifest, files: ShardFiles, *, verify: bool = False,
                 on_damage: OnDamage | None = None) -> None:
        self.store, self.manifest, self._files = store, manifest, files
        self._integrity, self._on_damage = Integrity(verify), on_damage
        self._counts = np.array([shard.rows for shard in manifest.shards], dtype=np.int64)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._suspect: set[int] = set()  # something was wrong with them: to be checked whole before the next read
        self._lock = threading.Lock()

    @classmethod
    def open(cls, uri: str, cache: Path | None = None, *, cache_bytes: int = CACHE_BYTES, verify: bool = False,
             on_damage: OnDamage | None = None, manifest: Manifest | None = None) -> ShardSet:
        """The set at `uri`. Shards open when first read: memory-mapped in place, or copied from an object store into
        `cache` with their hash checked.

        Args:
            uri: the set.
            cache: folder of copies; default: a temporary one.
            cache_bytes: room for them.
            verify: hash files in place too, see `shards.integrity`.
            on_damage: told (where, what) when a shard had to be read again, by whatever thread reads.
            manifest: of the set, if it is known already.

        Raises:
            ShardError: there is no set, its manifest is damaged, or it is a preference set.
        """
        store = storage.store(uri)
        manifest = read_manifest(store) if manifest is None else manifest
        if manifest.kind != PACKED:
            raise ShardError(f"a set of {manifest.kind}: its rows are pairs, no packed sequences", where=store.uri,
                             mend="read it with tidewheel.shards.preferences.read_pairs")
        return cls(store, manifest, ShardFiles(store, cache, cache_bytes), verify=verify, on_damage=on_damage)

    def follow(self, manifest: Manifest) -> None:
        """The set's manifest is this one now: the same with more shards behind it."""
        if manifest is not self.manifest:
            with self._lock:
                self._counts = np.array([shard.rows for shard in manifest.shards], dtype=np.int64)
                self.manifest = manifest

    def shard(self, index: int) -> Shard:
        """Shard number `index`, opened at its first use.

        Raises:
            ShardError: it is missing or damaged; names the shard.
        """
        with self._lock:
            found = self._open.get(index)
            if found is not None:
                self._open.move_to_end(index)
                problem = self._integrity.problem(self.manifest.shards[index])
                if problem:
                    raise self._damaged(index, problem)
                return found
        return self._load(index, anew=index in self._suspect)  # outside the lock: a download must not stop others

    def _load(self, index: int, *, anew: bool = False) -> Shard:
        """Open a shard; `anew`: from its origin, with its whole content checked."""
        info = self.manifest.shards[index]
        with self._files.opened(info) as (path, readable):
            before = fingerprint(readable)
            if anew and (problem := problem_of(readable, info)):
                raise self._damaged(index, f"{problem}; it was read twice")
            found = open_shard(readable, info, self.manifest, self.store.at(info.name))
        with self._lock:
            if index not in self._open or anew:
                self._open[index] = found
                self._suspect.discard(index)
                self._integrity.opened(info, path, before, hashed=anew or self._files.copies)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[index]

    def _read_again(self, indices: list[int], error: ShardError) -> None:
        """Something is wrong with one of these shards: throw what is at hand away and get it from its origin."""
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
        """Return once the content of every shard read so far is known to be right.

        Raises:
            ShardError: that of one is not, nor when it is read again.
        """
        names = self._integrity.unsettled()
        for index in [index for index, info in enumerate(self.manifest.shards) if info.name in names]:
            self._read_again([index], self._damaged(index, "the shard's content is not what its manifest says"))

    def close(self) -> None:
        """Stop hashing in the background."""
        self._integrity.close()

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Gather [B] rows: row `rows[i]` of shard number `shards[i]`. A shard that is damaged is read again first.

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

    def _gather(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        manifest, count = self.manifest, len(shards)
        shape = (count, manifest.sequence_length)
        tokens = np.empty(shape, dtype=manifest.token_dtype)
        lengths = np.empty(count, dtype=np.int32)
        marks = np.zeros(shape, dtype=bool)
        mask = np.empty(shape, dtype=np.uint8) if manifest.loss_mask else None
        for index in np.unique(shards).tolist():
            shard = self.shard(index)
            here = np.flatnonzero(shards == index)
            wanted = rows[here]
            found = shard.tokens[wanted]
            tokens[here], lengths[here] = found, shard.lengths[wanted]
            if mask is not None and shard.loss_mask is not None:
                mask[here] = shard.loss_mask[wanted]
            self._mark(marks, index, shard, here, wanted)
            if len(here) and int(found.max()) >= manifest.vocabulary_size:
                raise self._damaged(index, f"a token is outside the vocabulary of {manifest.vocabulary_size}")
        segment_ids, positions = _spell_out(marks, lengths)
        ids = [f"{manifest.shards[shard].name}:{row}" for shard, row in zip(shards.tolist(), rows.tolist())]
        return Rows(tokens, lengths, segment_ids, positions, ids, mask)

    def _check(self, shards: np.ndarray, rows: np.ndarray) -> None:
        known = self._counts
        if shards.shape != rows.shape or shards.ndim != 1:
            raise IndexError(f"shards and rows must be two equal lists, got {shards.shape} and {rows.shape}")
        if shards.size and (shards.min() < 0 or shards.max() >= len(known) or rows.min() < 0
                            or np.any(rows >= known[shards])):
            raise IndexError(f"no such row in a set of {len(known)} shards, {self.manifest.rows} rows")

    def _mark(self, marks: np.ndarray, index: int, shard: Shard, here: np.ndarray, wanted: np.ndarray) -> None:
        """Set `marks` [B, L] where the rows' segments begin."""
        first = shard.segment_bounds[wanted].astype(np.int64)
        counts = shard.segment_bounds[wanted + 1] - first
        lengths = shard.lengths[wanted]
        if np.any(counts < 1) or first.min() < 0 or (first + counts).max() > len(shard.segment_starts) \
                or lengths.min() < 1 or lengths.max() > marks.shape[1]:
            raise self._damaged(index, "a row has no segment or an impossible length")
        owner = np.repeat(np.arange(len(wanted)), counts)
        begin = np.cumsum(counts) - counts
        starts = shard.segment_starts[first[owner] + np.arange(len(owner)) - begin[owner]]
        if np.any(starts < 0) or np.any(starts >= lengths[owner]) or np.any(starts[begin] != 0):
            raise self._damaged(index, "a segment begins outside its row")
        marks[here[owner], starts] = True

    def _damaged(self, index: int, what: str) -> ShardError:
        return ShardError(what, where=self.store.at(self.manifest.shards[index].name),
                          mend=f"`tidewheel shards verify {self.store.uri}` lists what is damaged; {REBUILD}")


def _spell_out(marks: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment_ids, positions) [B, L] int32 from the marks [B, L] where segments begin; every row has one at 0."""
    count, length = marks.shape
    padded = np.flatnonzero(lengths < length)
    marks[padded, lengths[padded]] = True  # padding is one more segment here
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
