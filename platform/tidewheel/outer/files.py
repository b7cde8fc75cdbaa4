"""Tensors of a group in a folder, as a checkpoint is: a safetensors file of each rank, and a manifest written last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tidewheel.checkpoint.agreement import Agreement
from tidewheel.checkpoint.commit import attempt_name
from tidewheel.checkpoint.loading import misfits
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest, parse_manifest
from tidewheel.checkpoint.peers import Peers, RankError
from tidewheel.checkpoint.reading import read_bytes, requests_of
from tidewheel.checkpoint.staging import local
from tidewheel.checkpoint.tensor_entry import RankFile, TensorEntry
from tidewheel.checkpoint.writing import Persist, write_checkpoint
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.storage import Store, content_hash

Flat = Mapping[str, torch.Tensor]
FIX = "restore it from a copy; or start the group again once another has committed a newer state, which it takes"


class Folder:
    """Sets of tensors below a folder, written and read by all ranks of a group together.

    Args:
        store: the folder.
        peers: the ranks.
        persist: runs a request, again while the store is unavailable.
    """

    def __init__(self, store: Store, peers: Peers, persist: Persist) -> None:
        self.store = store
        self._peers, self._persist = peers, persist
        self._agreement = Agreement()
        self.written_bytes = 0
        """Bytes that all ranks have written."""
        self.read_bytes = 0
        """Bytes that this rank has read."""

    def write(self, name: str, number: int, flat: Flat, extra: dict[str, Any]) -> str:
        """Write tensors and return the hash of the manifest.

        Another group may write a set of the same name and content at the same time; the last manifest counts.

        Args:
            name: of the set, `checkpoint.manifest.step_name`.
            number: in the name.
            flat: plain tensors or DTensors by path.
            extra: JSON values that go with them.
        """
        def describe(files: tuple[RankFile, ...], tensors: dict[str, TensorEntry]) -> CheckpointManifest:
            return CheckpointManifest(number, self._peers.size, time.time(), files, tensors, extra)

        def publish(manifest: CheckpointManifest) -> tuple[str, int]:
            stamp = self.store.write(f"{name}/{KEY}", manifest.to_json())
            return stamp.hash, manifest.total_bytes + stamp.bytes

        staged = {path: local(tensor).cpu() for path, tensor in flat.items()}
        digest, written = write_checkpoint(
            self.store, name, self._peers, self._agreement, flat, staged, attempt_name(None), persist=self._persist,
            describe=describe, publish=publish)
        self.written_bytes += written
        return digest

    def exists(self, name: str) -> bool:
        """Return whether a set is committed; the same on all ranks."""
        return bool(self._peers.from_first(lambda: self._persist(lambda: self.store.exists(f"{name}/{KEY}"))))

    def read(self, name: str, flat: Flat, expected: str = "") -> None:
        """Fill this rank's part of tensors in place. Each file read is verified.

        Args:
            name: of the set.
            flat: plain tensors or DTensors by path, of the stored shapes and dtypes.
            expected: hash of the manifest; "": any.

        Raises:
            CheckpointError: there is no such set, or it is damaged.
            ConfigError: it does not fit.
        """
        where = self.store.at(name)
        failed: Exception | None = None
        try:
            data = self._peers.from_first(lambda: self._persist(lambda: self.store.read(f"{name}/{KEY}")))
            if expected and content_hash(data) != expected:
                raise CheckpointError("its manifest is not the one that the round was decided with")
            self._fill(name, parse_manifest(data, name, where), flat)
        except FileNotFoundError as error:
            failed = CheckpointError(f"a file is missing: {error}", where=where, fix=FIX)
        except CheckpointError as error:
            failed = CheckpointError(error.what, where=error.where or where, fix=FIX)
        except Exception as error:  # the other ranks wait for it
            failed = error
        try:
            self._peers.to_first(failed)
        except RankError as error:
            raise error.error from error

    def _fill(self, name: str, manifest: CheckpointManifest, flat: Flat) -> None:
        if lines := misfits(manifest, flat):
            raise ConfigError("; ".join(lines)[:500], where=self.store.at(name),
                              fix="give all groups the same model and settings")
        for index, requests in requests_of(manifest, flat).items():
            file = manifest.files[index]
            data = self._persist(partial(read_bytes, self.store, f"{name}/{file.key}", 0, file.bytes))
            self.read_bytes += file.bytes
            if content_hash(data.numpy().data) != file.hash:
                raise CheckpointError(f"{file.key} is damaged")
            for request in requests:
                request.fill(data[request.start:request.end])


def placed_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded by rows as another one is, and shares memory with this rank's part of it.

    Args:
        tensor: the other one, plain or a DTensor.
        part: this rank's part, of any dtype and dimensions but for the rows.
    """
    if not isinstance(tensor, DTensor):
        return part
    shape = torch.Size((*tensor.shape[:1], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def check_model(weights: Flat, buffers: Sequence[str]) -> None:
    """Raise ConfigError unless the outer step can be taken on the parts of weights that this rank has.

    Args:
        weights: by name.
        buffers: names of what a checkpoint holds besides.
    """
    if buffers:
        raise ConfigError(f"the model keeps {buffers[0]} besides its weights, which groups would not share",
                          where="outer", fix="train a dense model, or a mixture of experts that balances by its loss")
    for name, weight in weights.items():
        placements = weight.placements if isinstance(weight, DTensor) else ()
        if any(not isinstance(place, Replicate) and place != Shard(0) for place in placements):
            raise ConfigError(f"{name} is placed as {placements}, but outer gradients are sharded by rows",
                              where="outer", fix="choose parallel.data zero2")
