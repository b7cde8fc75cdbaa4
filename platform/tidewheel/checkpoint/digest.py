"""One SHA-256 for the tensors of a checkpoint, whatever layout and number of workers wrote it. Needs no torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np

from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.storage import Store


@dataclass(frozen=True)
class Digest:
    """Hashes of a checkpoint's tensors; two digests are equal when step and bits are equal."""

    checkpoint: str = field(compare=False)
    """URI."""
    step: int
    groups: dict[str, str]
    """SHA-256 in hex of each part of the state, "model" and "optimizer"."""
    state: str
    """SHA-256 in hex of everything."""


def digest(uri: str) -> Digest:
    """Verify a checkpoint and return its digest.

    The hash is over each tensor in the order of their names: its name, dtype and shape, then its elements in row-major
    order, little-endian. It does not depend on how tensors are cut or files are divided. One tensor at a time is held
    in memory.

    Args:
        uri: a run (its newest complete checkpoint) or one checkpoint, RUN/checkpoints/step_00000100.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    _, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    check_files(checkpoints, name, manifest)
    groups = {group: hashlib.sha256() for group in sorted({path.partition("/")[0] for path in manifest.tensors})}
    everything = hashlib.sha256()
    for path, entry in sorted(manifest.tensors.items()):
        head = f"{path} {entry.dtype} {list(entry.shape)}\n".encode()
        content = _content(checkpoints, name, manifest, path)
        for hashed in (groups[path.partition("/")[0]], everything):
            hashed.update(head)
            hashed.update(content.data)
    hashes = {group: hashed.hexdigest() for group, hashed in groups.items()}
    return Digest(checkpoints.at(name), manifest.step, hashes, everything.hexdigest())


def _content(store: Store, name: str, manifest: CheckpointManifest, path: str) -> np.ndarray:
    """Return the bytes of a whole tensor, assembled from its parts: contiguous uint8."""
    entry = manifest.tensors[path]
    whole = np.empty((*entry.shape, entry.itemsize), dtype=np.uint8)
    for chunk in manifest.chunks(path):
        length = math.prod(chunk.sizes) * entry.itemsize
        data = store.read(f"{name}/{manifest.files[chunk.file].key}", chunk.start, length)
        box = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes))
        whole[box] = np.frombuffer(data, dtype=np.uint8).reshape(*chunk.sizes, entry.itemsize)
    return whole.reshape(-1)
