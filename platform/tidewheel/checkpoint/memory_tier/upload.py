"""Write a complete step in memory as a checkpoint, as agents do when all workers are gone.

The files and the manifest are the same as `CheckpointManager` writes. This module does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tidewheel.checkpoint.commit import attempt_name, folder_name, publish
from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.memory_tier.inventory import Recoverable
from tidewheel.checkpoint.memory_tier.part_reader import PartReader
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.table import Piece
from tidewheel.checkpoint.safetensors_head import part_name, safetensors_head
from tidewheel.checkpoint.sharding import Box
from tidewheel.checkpoint.tensor_entry import Chunk, RankFile, TensorEntry, file_order, own_parts
from tidewheel.commit_log import CommitLog
from tidewheel.storage import CHUNK_BYTES, Store


def upload(recoverable: Recoverable, store: Store, *, own_agent: Address | None = None,
           before_commit: Callable[[], None] = lambda: None) -> CheckpointManifest:
    """Write all parts in chunks, one part after the other, then the manifest.

    Args:
        recoverable: the step.
        store: the run's `checkpoints` folder.
        own_agent: the agent of this node, whose slots are mapped instead of sent.
        before_commit: called when everything but the manifest is written; if it raises, there is no manifest.

    Raises:
        CheckpointError: a part is damaged or gone in all copies.
        StorageError: the store fails.
        OwnershipError: another driver has taken the run over.
    """
    parts = [PartReader(sorted(copies, key=lambda copy: copy.agent != own_agent), recoverable.run_token, own_agent)
             for copies in recoverable.copies]
    try:
        return _upload(recoverable, store, parts, before_commit)
    finally:
        for part in parts:  # an agent keeps what it holds while a reader is connected
            part.close()


def _upload(recoverable: Recoverable, store: Store, parts: Sequence[PartReader],
            before_commit: Callable[[], None]) -> CheckpointManifest:
    name = folder_name(store, recoverable.step, recoverable.generation)
    attempt = attempt_name(recoverable.generation)
    files: list[RankFile] = []
    entries: dict[str, TensorEntry] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank, part in enumerate(parts):
        part.describe()
        own = sorted(_own(part, rank, seen), key=lambda piece: (file_order(piece.name, piece.itemsize), piece.offsets))
        if own:
            file, starts = _write(store, name, part, own, rank, attempt)
            _enter(entries, part.rules, own, starts, len(files))
            files.append(file)
        part.close()
    manifest = CheckpointManifest(recoverable.step, recoverable.world_size, time.time(), tuple(files), entries,
                                  parts[0].extra, recoverable.generation)
    before_commit()
    publish(store, name, manifest, owned=CommitLog(store).head() is not None)
    return manifest


def _own(part: PartReader, rank: int, seen: set[tuple[str, tuple[int, ...]]]) -> list[Piece]:
    """Return the pieces of a part that go to its file: those of the rules, or of equal pieces the first."""
    if part.rules:
        parts = own_parts(part.rules, rank)
        return [piece for piece in part.pieces if parts.get(piece.name) == Box(piece.offsets, piece.sizes)]
    own = [piece for piece in part.pieces if (piece.name, piece.offsets) not in seen]
    seen.update((piece.name, piece.offsets) for piece in own)
    return own


def _write(store: Store, name: str, part: PartReader, own: Sequence[Piece], rank: int, attempt: str
           ) -> tuple[RankFile, list[int]]:
    """Write a file, and return it with the first byte of each piece."""
    header, starts = safetensors_head(
        (part_name(piece.name, piece.shape, piece.offsets, piece.sizes), piece.dtype, piece.sizes) for piece in own)
    key = f"rank_{rank:05d}-{attempt}.safetensors"
    with store.writer(f"{name}/{key}") as sink:
        sink.write(header)
        for piece in own:
            for start in range(piece.start, piece.start + piece.bytes, CHUNK_BYTES):
                sink.write(part.read(start, min(start + CHUNK_BYTES, piece.start + piece.bytes)))
    return RankFile(key, sink.stamp.bytes, sink.stamp.hash, rank, len(header)), starts


def _enter(entries: dict[str, TensorEntry], rules: Mapping[str, TensorEntry], own: Sequence[Piece],
           starts: Sequence[int], file: int) -> None:
    """Add a file's pieces to the entries of the manifest: the rules of all tensors, or each piece."""
    if rules:
        entries.update(rules)
        return
    for piece, start in zip(own, starts):
        chunks = entries[piece.name].chunks if piece.name in entries else ()
        entries[piece.name] = TensorEntry(piece.dtype, piece.shape, (
            *chunks, Chunk(file, start, piece.offsets, piece.sizes)))
