"""Tensors of a group in a folder, as a checkpoint is: a safetensors file of each rank, and a manifest written last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from tidewheel.checkpoint.agreement import Agreement, own_box
from tidewheel.checkpoint.commit import attempt_name
from tidewheel.checkpoint.filling import Request
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest, parse_manifest
from tidewheel.checkpoint.peers import Peers, RankError
from tidewheel.checkpoint.staging import dtype_name, local
from tidewheel.checkpoint.tensor_entry import RankFile, TensorEntry
from tidewheel.checkpoint.writing import write_checkpoint
from tidewheel.errors import CheckpointError
from tidewheel.storage import Store, content_hash

T = TypeVar("T")
Persist = Callable[[Callable[[], Any]], Any]
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
        self.read_bytes = 0
        """Bytes that this rank has read."""

    def write(self, name: str, number: int, flat: Flat, extra: dict[str, Any]) -> tuple[str, int]:
        """Write tensors unless they are there, and return the hash and the bytes of what this call has committed.

        The hash is that of the manifest, "" if another writer came first.

        Args:
            name: of the set, `checkpoint.manifest.step_name`.
            number: in the name.
            flat: plain tensors or DTensors by path.
            extra: JSON values that go with them.
        """
        committed: list[tuple[str, int]] = []
        peers, store = self._peers, self.store

        def describe(files: tuple[RankFile, ...], tensors: dict[str, TensorEntry]) -> CheckpointManifest:
            return CheckpointManifest(number, peers.size, time.time(), files, tensors, extra)

        def publish(manifest: CheckpointManifest) -> None:
            data = manifest.to_json()
            stored = data if store.create(f"{name}/{KEY}", data) else store.read(f"{name}/{KEY}")
            if stored == data:  # a request that was repeated may find its own manifest
                committed.append((content_hash(data), manifest.total_bytes + len(data)))
                return
            other = parse_manifest(stored, name, store.at(name))
            for file in {file.key for file in manifest.files} - {file.key for file in other.files}:
                store.delete(f"{name}/{file}")

        staged = {path: local(tensor).detach().cpu() for path, tensor in flat.items()}
        write_checkpoint(store, name, peers, self._agreement, flat, staged, attempt_name(None), persist=self._persist,
                         describe=describe, publish=publish)
        written: tuple[str, int] = peers.from_first(lambda: committed[-1] if committed else ("", 0))
        return written

    def exists(self, name: str) -> bool:
        """Return whether a set is committed; the same on all ranks."""
        return bool(self._peers.from_first(lambda: self._persist(lambda: self.store.exists(f"{name}/{KEY}"))))

    def read(self, name: str, flat: Flat, expected: str = "") -> dict[str, Any]:
        """Fill this rank's part of tensors in place and return what goes with them. Each file read is verified.

        Args:
            name: of the set.
            flat: plain tensors or DTensors by path, of the stored shapes and dtypes.
            expected: hash of the manifest; "": any.

        Raises:
            CheckpointError: there is no such set, it is damaged, or it does not fit.
        """
        key = f"{name}/{KEY}"
        text = self._peers.from_first(lambda: self._persist(lambda: self.store.read(key)).decode())
        where = self.store.at(name)
        if expected and content_hash(text.encode()) != expected:
            raise CheckpointError("its manifest is not the one that the round was decided with", where=where,
                                  fix=FIX)
        manifest = parse_manifest(text.encode(), name, where)
        failed: Exception | None = None
        try:
            self._fill(name, manifest, flat)
        except Exception as error:  # the other ranks wait for it
            failed = error
        try:
            self._peers.to_first(failed)
        except RankError as error:
            raise error.error from error
        return manifest.extra

    def _fill(self, name: str, manifest: CheckpointManifest, flat: Flat) -> None:
        requests: dict[int, list[Request]] = defaultdict(list)
        for path, tensor in flat.items():
            entry = manifest.tensors.get(path)
            if entry is None or entry.shape != tuple(tensor.shape) or entry.dtype != dtype_name(tensor):
                stored = "is missing" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
                raise CheckpointError(f"{path} {stored}, expected {dtype_name(tensor)} {list(tensor.shape)}",
                                      where=self.store.at(name), fix="give all groups the same model and settings")
            own = own_box(tensor)
            for chunk in manifest.chunks(path, own):
                request = Request.of(local(tensor), own, chunk.box, getattr(torch, entry.dtype), chunk.start)
                assert request is not None
                requests[chunk.file].append(request)
        for index, wanted in requests.items():
            file = manifest.files[index]
            data = self._persist(partial(self.store.read, f"{name}/{file.key}"))
            self.read_bytes += len(data)
            if len(data) != file.bytes or content_hash(data) != file.hash:
                raise CheckpointError(f"{file.key} is damaged", where=self.store.at(name),
                                      fix=FIX)
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for request in wanted:
                request.fill(content[request.start:request.end])


def placed_like(tensor: torch.Tensor, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded by rows as another one is.

    Args:
        tensor: the other one, plain or a DTensor.
        part: this rank's part.
        shape: of the whole tensor.
    """
    if not isinstance(tensor, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape),
                              stride=stride)
