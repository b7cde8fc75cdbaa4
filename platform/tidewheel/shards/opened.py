"""Shard sets opened for reading: what the readers of all kinds of rows share.

A shard is opened when it is first read, and damage to it is noticed and repaired from its origin where possible.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.shards.appended import Appended
from tidewheel.shards.cache import CACHE_BYTES, ShardFiles
from tidewheel.shards.integrity import Integrity, fingerprint, problem_of
from tidewheel.shards.manifest import PACKED, PARTS, PREFERENCES, REBUILD, ROLLOUTS, Manifest, read_manifest

logger = logging.getLogger(__name__)

S = TypeVar("S")
OnDamage = Callable[[str, str], None]
OPEN_SHARDS = 1024
"""Number of memory maps held open; Linux allows a process 65,530 (vm.max_map_count)."""
ROWS = {PACKED: "packed sequences", PREFERENCES: "pairs", ROLLOUTS: "rollouts"}
"""What a row is, by the kind of set, for messages."""


@dataclass(frozen=True)
class TeacherRows:
    """What a teacher says of B rows of L tokens; see `shards.teachers`."""

    tokens: np.ndarray
    """[B, L, K] in the set's token_dtype."""
    log_probabilities: np.ndarray
    """[B, L, K + 1] fp32."""

    def cut(self, part: slice | np.ndarray, length: int | None = None) -> TeacherRows:
        """Return some of the rows, cut to `length` tokens."""
        return TeacherRows(self.tokens[part][:, :length], self.log_probabilities[part][:, :length])


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
    parts: int = 1
    """Number of sequences of equal width side by side in a row of L tokens; more than 1 for pairs (`shards.pairs`)."""
    reference: np.ndarray | None = None
    """[B, parts] fp32: log-probability of each part's answer under a reference model; None: not read."""
    teacher: TeacherRows | None = None
    """A teacher's most likely tokens; None: not read."""
    margins: np.ndarray | None = None
    """[B] fp32: by how much the chosen answer of each pair is better; None: the set has none."""
    desirable: np.ndarray | None = None
    """[B] bool, of an unpaired set: whether the answer of each row is desirable; None: rows have two answers."""
    sampled: np.ndarray | None = None
    """[B, L] fp32: log-probability of each token of an answer under the policy that sampled it, 0 elsewhere; None: the
    rows are no rollouts."""
    referred: np.ndarray | None = None
    """[B, L] fp32: the same under a reference model; None: the set has none."""
    advantages: np.ndarray | None = None
    """Of rollouts: [B] fp32, or [B, L] if tokens have their own."""
    step_labels: np.ndarray | None = None
    """[B, L] int8: 1 at the end of a right step of an answer, 0 at that of a wrong one, else -1; None: the set has
    none."""
    values: np.ndarray | None = None
    """[B, L] fp32: estimate of the return from each token on when it was sampled; None: the set has none."""
    returns: np.ndarray | None = None
    """[B, L] fp32: what a value head learns; None: the set has none."""

    @property
    def answers(self) -> int:
        """Parts of a row with answers to its own prompt; the others are mismatched."""
        return self.parts if self.parts == 1 else PARTS if self.desirable is None else 1

    def only(self, parts: slice) -> Rows:
        """Return the rows with some of their parts."""
        def chosen(values: np.ndarray) -> np.ndarray:
            split = values.reshape(len(values), self.parts, self.width)[:, parts]
            return split.reshape(len(values), -1)

        segment_ids = chosen(self.segment_ids)
        return Rows(chosen(self.tokens), (segment_ids >= 0).sum(axis=1).astype(np.int32), segment_ids,
                    chosen(self.positions), self.ids, None if self.loss_mask is None else chosen(self.loss_mask),
                    segment_ids.shape[1] // self.width,
                    None if self.reference is None else self.reference[:, parts], margins=self.margins,
                    desirable=self.desirable,
                    step_labels=None if self.step_labels is None else chosen(self.step_labels))

    @property
    def width(self) -> int:
        """Tokens of each part of a row, padding included."""
        return self.tokens.shape[1] // self.parts


class OpenedSet(Generic[S]):
    """A shard set opened for reading, of any kind of rows. Safe to use from several threads.

    Args:
        store: the set's folder.
        manifest: its manifest.
        files: local paths of its shards.
        verify: hash files in place too, see `shards.integrity`.
        on_damage: see `open`.
    """

    KIND: ClassVar[str]
    """The kind of set, `Manifest.kind`."""

    def __init__(self, store: storage.Store, manifest: Manifest, files: ShardFiles, *, verify: bool = False,
                 on_damage: OnDamage | None = None) -> None:
        self.store, self.manifest, self._files = store, manifest, files
        self._integrity, self._on_damage = Integrity(verify), on_damage
        self._counts = Appended([shard.rows for shard in manifest.shards])
        self._open: OrderedDict[int, S] = OrderedDict()
        self._suspect: set[int] = set()  # damage was seen: check the whole file before the next read
        self._lock = threading.Lock()

    @classmethod
    def open(cls, uri: str, cache: Path | None = None, *, cache_bytes: int = CACHE_BYTES, verify: bool = False,
             on_damage: OnDamage | None = None, manifest: Manifest | None = None) -> Self:
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
            ShardError: there is no set, its manifest is damaged, or its rows are of another kind.
        """
        store = storage.store(uri)
        manifest = read_manifest(store) if manifest is None else manifest
        if manifest.kind != cls.KIND:
            raise ShardError(f"a set of {manifest.kind}: its rows are {ROWS[manifest.kind]}, not {ROWS[cls.KIND]}",
                             where=store.uri, fix=f"give a set whose rows are {ROWS[cls.KIND]}")
        return cls(store, manifest, ShardFiles(store, cache, cache_bytes), verify=verify, on_damage=on_damage)

    def follow(self, manifest: Manifest) -> None:
        """Replace the manifest by one with the same shards and more after them."""
        if manifest is not self.manifest:
            with self._lock:
                known = len(self._counts.values)
                self._counts.extend([shard.rows for shard in manifest.shards[known:]])
                self.manifest = manifest

    def shard(self, index: int) -> S:
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

    def _load(self, index: int, *, anew: bool = False) -> S:
        """Open a shard; with `anew`, get it from its origin and check its whole content."""
        info = self.manifest.shards[index]
        with self._files.opened(info) as (path, readable):
            before = fingerprint(readable)
            if anew and (problem := problem_of(readable, info)):
                raise self._damaged(index, f"{problem}; it was read twice")
            opened = self._opened(readable, index)
        with self._lock:
            if index not in self._open or anew:
                self._open[index] = opened
                self._suspect.discard(index)
                self._integrity.opened(info, path, before, hashed=anew or self._files.copies)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[index]

    def _opened(self, path: Path, index: int) -> S:
        """Memory-map shard number `index` and check its columns.

        Raises:
            ShardError: it is not what the manifest says.
        """
        raise NotImplementedError

    def _gather(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Return rows; see `rows`."""
        raise NotImplementedError

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
        damaged = [index for index, info in enumerate(self.manifest.shards) if info.name in names] if names else []
        for index in damaged:
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
        """Return the tokens of row `rows[i]` of shard number `shards[i]` for each i, int32 [B].

        Of a pair they are those of the longer sequence.

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
            lengths[in_shard] = self._lengths(self.shard(index))[rows[in_shard]]
        return lengths

    def _lengths(self, shard: S) -> np.ndarray:
        """Return the tokens of each row of a shard."""
        raise NotImplementedError

    def attention_pairs(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return how many pairs of tokens causal attention computes in a row, int64 [B]; see `lengths`.

        Only sets of packed sequences know it.
        """
        self._check(shards, rows)
        pairs = np.empty(len(shards), dtype=np.int64)
        for index in np.unique(shards).tolist():
            in_shard = shards == index
            pairs[in_shard] = self._attention_pairs(self.shard(index), rows[in_shard])
        return pairs

    def _attention_pairs(self, shard: S, rows: np.ndarray) -> np.ndarray:
        """Return the pairs of some rows of a shard."""
        raise NotImplementedError

    def _check(self, shards: np.ndarray, rows: np.ndarray) -> None:
        counts = self._counts.values
        if shards.shape != rows.shape or shards.ndim != 1:
            raise IndexError(f"shards and rows must be two equal lists, got {shards.shape} and {rows.shape}")
        if shards.size and (shards.min() < 0 or shards.max() >= len(counts) or rows.min() < 0
                            or np.any(rows >= counts[shards])):
            raise IndexError(f"no such row in a set of {len(counts)} shards, {self.manifest.rows} rows")

    def _damaged(self, index: int, what: str) -> ShardError:
        return ShardError(what, where=self.store.at(self.manifest.shards[index].name),
                          fix=f"`tidewheel shards verify {self.store.uri}` lists what is damaged; {REBUILD}")
