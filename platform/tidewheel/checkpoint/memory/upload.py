"""Write a step that is whole in memory as a checkpoint: what agents do for training that is gone.

The same files and manifest as `CheckpointManager` writes, so that whoever reads checkpoints reads this one. No torch.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence

from tidewheel.checkpoint.manifest import DTYPES, KEY, CheckpointManifest, Chunk, TensorEntry, step_name
from tidewheel.checkpoint.memory.find import PartReader, Recoverable
from tidewheel.checkpoint.memory.protocol import Address
from tidewheel.checkpoint.memory.table import Piece
from tidewheel.storage import CHUNK_BYTES, Stamp, Store


def upload(recoverable: Recoverable, store: Store, *, mine: Address | None = None) -> CheckpointManifest:
    """Write all parts one after the other in chunks, then the manifest.

    Args:
        store: the run's `checkpoints` folder.
        mine: the agent of this node: its parts are mapped.

    Raises:
        CheckpointError: a part is damaged or gone in all its copies.
        StorageError: the store fails.
    """
    name, attempt = step_name(recoverable.step), uuid.uuid4().hex[:8]
    parts = [PartReader(sorted(copies, key=lambda copy: copy.agent != mine), recoverable.run_token, mine)
             for copies in recoverable.copies]
    files: list[Stamp] = []
    entries: dict[str, TensorEntry] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank, part in enumerate(parts):
        part.describe()
        own = [piece for piece in part.pieces if (piece.name, piece.offsets) not in seen]  # of copies, the first
        seen.update((piece.name, piece.offsets) for piece in own)
        if not own:
            continue
        own.sort(key=lambda piece: (-piece.itemsize, piece.name, piece.offsets))
        header, starts = safetensors_header(own)
        key = f"rank_{rank:05d}-{attempt}.safetensors"
        with store.writer(f"{name}/{key}") as sink:
            sink.write(header)
            for piece in own:
                for start in range(piece.start, piece.start + piece.bytes, CHUNK_BYTES):
                    sink.write(part.read(start, min(start + CHUNK_BYTES, piece.start + piece.bytes)))
        for piece, start in zip(own, starts):
            chunks = entries[piece.name].chunks if piece.name in entries else ()
            entries[piece.name] = TensorEntry(piece.dtype, piece.shape, (
                *chunks, Chunk(len(files), start, piece.offsets, piece.sizes)))
        files.append(Stamp(key, sink.stamp.bytes, sink.stamp.hash))
        part.close()
    manifest = CheckpointManifest(recoverable.step, recoverable.world_size, time.time(), tuple(files), entries,
                                  parts[0].extra)
    store.write(f"{name}/{KEY}", manifest.to_json())
    return manifest


def safetensors_header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The head of a safetensors file with these tensors, and where each begins in the file; as `dcp.Writer` names
    them."""
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for piece in pieces:
        place = "" if piece.sizes == piece.shape else "@" + ",".join(map(str, piece.offsets))
        described[piece.name + place] = {"dtype": DTYPES[piece.dtype][0], "shape": list(piece.sizes),
                                         "data_offsets": [at, at + piece.bytes]}
        starts.append(at)
        at += piece.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [start + len(head) for start in starts]
