"""Write a checkpoint's files: each rank its own, in the safetensors format, hashed while it streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

from tidewheel.checkpoint.agreement import Agreement
from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.safetensors_head import part_name, safetensors_head
from tidewheel.checkpoint.staging import dtype_name
from tidewheel.checkpoint.tensor_entry import RankFile, TensorEntry, own_parts
from tidewheel.storage import Stamp, Store

T = TypeVar("T")


class Persist(Protocol):
    """Runs a write or read within a time limit, or again while the store is unavailable."""

    def __call__(self, request: Callable[[], T], /) -> T:
        """Return what `request` returns."""
        ...


def write_checkpoint(store: Store, name: str, peers: Peers, agreement: Agreement, flat: Mapping[str, torch.Tensor],
                     staged: Mapping[str, torch.Tensor] | Exception, attempt: str, *, persist: Persist,
                     describe: Callable[[tuple[RankFile, ...], dict[str, TensorEntry]], CheckpointManifest],
                     publish: Callable[[CheckpointManifest], T]) -> T:
    """Write this rank's file, and on rank 0 the manifest once all have written theirs. All ranks call this together.

    Return what `publish` returns, on all ranks.

    Args:
        store: the run's `checkpoints` folder.
        name: folder of this checkpoint.
        peers: the ranks.
        agreement: of the same state, kept from one save to the next.
        flat: tensors by path, from whose shards the plan is made.
        staged: their contents, or the error that prevented the copy.
        attempt: part of the file's name that is unique to this attempt, so that a checkpoint is never overwritten.
        persist: runs a write within the time limit of the save.
        describe: returns the manifest for (files, tensors); called on rank 0.
        publish: writes the manifest and commits the checkpoint; called on rank 0.

    Raises:
        CheckpointError: see `Agreement.rules`.
        peers.RankError: a rank has failed; the same on all ranks.
    """
    entries = agreement.rules(peers, flat)
    own: RankFile | Exception | None
    try:
        own = _write(store, name, peers.rank, entries, staged, attempt, persist)
    except Exception as error:  # the other ranks wait for it
        own = error
    files = peers.to_first(own)

    def commit() -> T:
        manifest = describe(tuple(file for file in files if file is not None), dict(entries))
        return persist(lambda: publish(manifest))

    return peers.from_first(commit)


def _write(store: Store, name: str, rank: int, entries: Mapping[str, TensorEntry],
           staged: Mapping[str, torch.Tensor] | Exception, attempt: str, persist: Persist) -> RankFile | None:
    """Write the parts that are this rank's to write; None: there are none."""
    if isinstance(staged, Exception):
        raise staged
    parts = own_parts(entries, rank)
    if not parts:
        return None
    tensors = [staged[path].detach().contiguous() for path in parts]
    head, _ = safetensors_head(
        (part_name(path, entries[path].shape, box.offsets, box.sizes), dtype_name(tensor), box.sizes)
        for (path, box), tensor in zip(parts.items(), tensors))
    key = f"rank_{rank:05d}-{attempt}.safetensors"
    stamp = persist(lambda: _stream(store, f"{name}/{key}", head, tensors))
    return RankFile(key, stamp.bytes, stamp.hash, rank, len(head))


def _stream(store: Store, key: str, head: bytes, tensors: list[torch.Tensor]) -> Stamp:
    with store.writer(key) as sink:
        sink.write(head)
        for tensor in tensors:
            sink.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sink.stamp
