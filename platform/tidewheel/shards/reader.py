"""Reading a shard set: zero-copy from a memory map locally, through a verified file cache from object storage."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewheel.errors import ShardError
from tidewheel.shards.format import check_table
from tidewheel.shards.manifest import Manifest, ShardInfo, read_manifest
from tidewheel.storage import LocalStore, Store, store

MEND = "run the pipeline again with the same output: what is damaged is written anew"


@dataclass(frozen=True)
class Rows:
    """B sequences.

    Attributes:
        tokens: [B, L] of the set's token dtype.
        lengths: [B] int32, real tokens of each row.
        segment_ids: [B, L] int32, which document's piece a token belongs to, counted in its row; -1 is padding.
        positions: [B, L] int32, distance from the start of the piece; 0 in the padding.
        ids: "shard name:row" of each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    ids: list[str]


class ShardSet:
    """An open shard set; use `open`. Safe to read from several threads."""

    def __init__(self, place: Store, manifest: Manifest, cache: Path) -> None:
        self._store, self.manifest, self._cache = place, manifest, cache
        self._tables: dict[int, pa.Table] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, uri: str, cache: Path | None = None) -> ShardSet:
        """The set at `uri`.

        Args:
            uri: the folder with manifest.json, local or s3://.
            cache: local folder for shard files from object storage; by default one in the temporary folder, shared by
                the processes of this machine (names are content hashes, so they cannot disagree).

        Raises:
            ShardError: no manifest, or a damaged one.
        """
        place = store(uri)
        manifest = read_manifest(place)
        name = hashlib.sha256(uri.encode()).hexdigest()[:12]
        return cls(place, manifest, cache or Path(tempfile.gettempdir(), "tidewheel-shards", name))

    def table(self, index: int) -> pa.Table:
        """Shard `index`, memory-mapped.

        Raises:
            ShardError: the file is missing, truncated or not what the manifest says.
        """
        with self._lock:
            if index not in self._tables:
                self._tables[index] = self._open(self.manifest.shards[index])
            return self._tables[index]

    def _open(self, shard: ShardInfo) -> pa.Table:
        path = self._store.local_path(shard.name) or self._fetch(shard)
        where = self._store.at(shard.name)
        try:
            size = path.stat().st_size
            if size != shard.bytes:
                raise ShardError(f"{size} bytes, the manifest says {shard.bytes}", where=where, mend=MEND)
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except FileNotFoundError:
            raise ShardError("the shard is missing", where=where, mend=MEND) from None
        except pa.ArrowInvalid as error:
            raise ShardError(f"not a readable Arrow file ({error})", where=where, mend=MEND) from None
        check_table(table, where=where, sequence_length=self.manifest.sequence_length, rows=shard.rows,
                    token_dtype=self.manifest.token_dtype, loss_mask=self.manifest.loss_mask)
        return table

    def _fetch(self, shard: ShardInfo) -> Path:
        """The shard as a local file; its hash is checked once, when it arrives."""
        cache = LocalStore(self._cache)
        path = self._cache / shard.name
        if path.is_file() and path.stat().st_size == shard.bytes:
            return path
        try:
            with self._store.open(shard.name) as source, cache.writer(shard.name) as sink:
                while chunk := source.read(8 << 20):
                    sink.write(chunk)
                if sink.stamp.hash != shard.hash:  # raised inside the block: a damaged copy is never published
                    raise ShardError("the content is not what the manifest says (hash differs)",
                                     where=self._store.at(shard.name), mend=MEND)
        except FileNotFoundError:
            raise ShardError("the shard is missing", where=self._store.at(shard.name), mend=MEND) from None
        return path

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Gather [B] rows, given as shard indices and rows inside them."""
        length, count = self.manifest.sequence_length, len(rows)
        tokens = np.empty((count, length), dtype=self.manifest.token_dtype)
        lengths = np.empty(count, dtype=np.int32)
        starts: list[np.ndarray] = [np.empty(0, np.int32)] * count
        for shard in np.unique(shards).tolist():
            table = self.table(int(shard))
            chosen = np.flatnonzero(shards == shard)
            self._gather(table, rows[chosen], chosen, tokens, lengths, starts)
        segment_ids, positions = segments(starts, lengths, length)
        names = [self.manifest.shards[shard].name for shard in shards.tolist()]
        ids = [f"{name}:{row}" for name, row in zip(names, rows.tolist())]
        return Rows(tokens, lengths, segment_ids, positions, ids)

    def _gather(self, table: pa.Table, rows: np.ndarray, into: np.ndarray, tokens: np.ndarray, lengths: np.ndarray,
                starts: list[np.ndarray]) -> None:
        """Copy `rows` of one shard to places `into`; batches are views of the memory map."""
        chunks = table.column("tokens").chunks
        bounds = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        if rows.size and (rows.min() < 0 or rows.max() >= bounds[-1]):
            raise IndexError(f"row {int(rows.max())} of a shard of {int(bounds[-1])}")
        which = np.searchsorted(bounds, rows, side="right") - 1
        for chunk in np.unique(which).tolist():
            mine = np.flatnonzero(which == chunk)
            inside, places = rows[mine] - bounds[chunk], into[mine]
            flat = chunks[chunk].flatten().to_numpy(zero_copy_only=True)
            tokens[places] = flat.reshape(-1, self.manifest.sequence_length)[inside]
            lengths[places] = table.column("length").chunk(chunk).to_numpy()[inside]
            lists = table.column("segment_starts").chunk(chunk)
            offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
            for place, row in zip(places.tolist(), inside.tolist()):
                starts[place] = values[offsets[row]: offsets[row + 1]]


def segments(starts: list[np.ndarray], lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, [B, L] int32 each, from the segment starts of each row."""
    count = len(starts)
    begins = np.zeros((count, length), dtype=np.int32)
    for row, where in enumerate(starts):
        begins[row, where] = 1
    segment_ids = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    place = np.arange(length, dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1).astype(np.int32)
    padding = place[None, :] >= lengths[:, None]
    segment_ids[padding], positions[padding] = -1, 0
    return segment_ids, positions
