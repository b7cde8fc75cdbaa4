"""Read the parts of a checkpoint that a rank needs, whatever layout wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.filling import Request, fill_window, windows
from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.staging import local
from tidewheel.errors import CheckpointError
from tidewheel.storage import Store

READERS = 8
"""Windows read at a time. On an object store, latency dominates."""
GAP_BYTES = 256 << 10
"""Parts that are less than this apart are read in one request: an object store sends so much in the time of another."""


def read_tensors(store: Store, name: str, manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's part of each tensor in place, converted to its dtype.

    Args:
        store: the run's `checkpoints` folder.
        name: the checkpoint, whose files have been verified.
        manifest: its manifest, which has every tensor in its shape.
        flat: tensors by path, see `staging.flatten`.

    Raises:
        CheckpointError: a file is shorter than the manifest says.
        StorageError: the store fails.
    """
    work = [(f"{name}/{manifest.files[file].key}", window)
            for file, wanted in requests_of(manifest, flat).items() for window in windows(wanted, GAP_BYTES)]
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint") as pool:
        for _ in pool.map(lambda item: _fill(store, *item), work):
            pass  # the first error is raised here


def requests_of(manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor]) -> dict[int, list[Request]]:
    """Return what to read of each file, by its index in the manifest, to fill this rank's part of each tensor.

    Args:
        manifest: of the checkpoint, which has every tensor in its shape.
        flat: tensors by path, see `staging.flatten`.
    """
    requests: dict[int, list[Request]] = defaultdict(list)
    for path, tensor in flat.items():
        own, dtype = own_box(tensor), getattr(torch, manifest.tensors[path].dtype)
        for chunk in manifest.chunks(path, own):
            request = Request.of(local(tensor), own, chunk.box, dtype, chunk.start)
            assert request is not None
            requests[chunk.file].append(request)
    return requests


def _fill(store: Store, key: str, window: list[Request]) -> None:
    start = window[0].start
    fill_window(window, read_bytes(store, key, start, max(request.end for request in window) - start))


def read_bytes(store: Store, key: str, start: int, length: int) -> torch.Tensor:
    """Return bytes of a file: uint8 [length].

    Args:
        store: the run's `checkpoints` folder.
        key: the file.
        start: first byte.
        length: number of bytes.

    Raises:
        CheckpointError: the file is shorter.
        StorageError: the store fails.
    """
    data = torch.empty(length, dtype=torch.uint8)
    if store.local_path(key) is not None:  # read into the tensor, without a copy
        with store.open(key) as stream:
            stream.seek(start)
            received = stream.readinto(data.numpy())  # type: ignore[attr-defined]
    else:
        content = store.read(key, start, length)
        received = len(content)
        data.numpy()[:received] = np.frombuffer(content, dtype=np.uint8)[:length]
    if received != length:
        raise CheckpointError(f"{received} bytes at {start}, expected {length}", where=store.at(key),
                              fix="the file changed while it was read; start again")
    return data
