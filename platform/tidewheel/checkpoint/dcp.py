"""Storage for torch's distributed checkpointing: torch plans which rank moves which part, this module moves the bytes.

Each rank writes one file in the safetensors format, hashed while it streams; rank 0 then writes the manifest. torch's
own storage writer is not used because it pickles its metadata and has no hashes.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tidewheel.checkpoint.manifest import DTYPES, CheckpointManifest, Chunk, TensorEntry
from tidewheel.checkpoint.safetensors_head import part_name, safetensors_head
from tidewheel.checkpoint.staging import dtype_name
from tidewheel.errors import CheckpointError
from tidewheel.storage import Stamp, Store

READERS = 8
"""Parts read at a time. On an object store, latency dominates."""

# torch warns at every save and load in a single process, which is a normal use here
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Place:
    """The position at which a part of a tensor was written."""

    file: Stamp
    start: int


class StagedPlanner(DefaultSavePlanner):
    """Plans from the live state's shapes and shards, but takes the data from its staged copy.

    Args:
        staged: the copy by path, or the error that prevented it, which `lookup_object` raises so that all ranks learn
            of it.
    """

    def __init__(self, staged: dict[str, torch.Tensor] | Exception) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def create_local_plan(self) -> SavePlan:
        """Return the plan without the empty parts of tensors that have fewer rows than ranks."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if _elements(item) or _is_empty(item)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if isinstance(self._staged, Exception):
            raise self._staged
        return self._staged[index.fqn]


class Writer(StorageWriter):
    """Writes one checkpoint: this rank's file, and on rank 0 the manifest.

    Args:
        store: the run's `checkpoints` folder.
        name: folder of this checkpoint.
        rank: this rank.
        attempt: part of the file's name that is unique to this attempt, so that a checkpoint is never overwritten.
        persist: runs a write within the time limit of the save.
        describe: returns the manifest for (files, tensors); called on rank 0.
        publish: writes the manifest and commits the checkpoint; called on rank 0.
    """

    def __init__(self, store: Store, name: str, rank: int, attempt: str, *, persist: Callable[[Callable[[], Any]], Any],
                 describe: Callable[[tuple[Stamp, ...], dict[str, TensorEntry]], CheckpointManifest],
                 publish: Callable[[CheckpointManifest], None]) -> None:
        self._store, self._name, self._describe, self._persist = store, name, describe, persist
        self._publish = publish
        self._file = f"rank_{rank:05d}-{attempt}.safetensors"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned parts. This already runs in the uploading thread, so the future is done on return."""
        items = sorted(plan.items, key=_file_order)
        results: list[WriteResult] = []
        if items:
            tensors = [_contiguous(planner.resolve_data(item)) for item in items]
            header, starts = safetensors_head(map(_described, items, tensors))
            stamp = self._persist(lambda: self._write(header, tensors))
            file = Stamp(self._file, stamp.bytes, stamp.hash)
            results = [WriteResult(index=item.index, size_in_bytes=tensor.nbytes, storage_data=Place(file, start))
                       for item, tensor, start in zip(items, tensors, starts)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, header: bytes, tensors: list[torch.Tensor]) -> Stamp:
        with self._store.writer(f"{self._name}/{self._file}") as sink:
            sink.write(header)
            for tensor in tensors:
                sink.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return sink.stamp

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; called on rank 0 once all ranks have written."""
        storage_of = {(result.index.fqn, result.index.offset): result.storage_data
                      for rank_results in results for result in rank_results}
        files = tuple(sorted({stored.file for stored in storage_of.values()}, key=lambda file: file.key))
        indices = {file.key: index for index, file in enumerate(files)}
        tensors = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for box in entry.chunks:
                stored = storage_of[fqn, box.offsets]
                chunks.append(Chunk(indices[stored.file.key], stored.start, tuple(box.offsets), tuple(box.sizes)))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[fqn] = TensorEntry(dtype, tuple(entry.size), tuple(chunks))
        manifest = self._describe(files, tensors)
        self._persist(lambda: self._publish(manifest))

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads the parts of a checkpoint that this rank needs.

    Args:
        store: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest; its files have been verified.
    """

    def __init__(self, store: Store, name: str, manifest: CheckpointManifest) -> None:
        self._store, self._name, self._manifest = store, name, manifest
        self._chunks = {(fqn, chunk.offsets): chunk
                        for fqn, entry in manifest.tensors.items() for chunk in entry.chunks}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({fqn: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, entry.dtype)), size=torch.Size(entry.shape),
            chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks])
            for fqn, entry in self._manifest.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint") as pool:
            for _ in pool.map(lambda item: self._read(item, planner), plan.items):
                pass  # the first error is raised here
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        assert item.type == LoadItemType.TENSOR  # the manifest holds nothing else
        assert item.storage_index.offset is not None
        entry = self._manifest.tensors[item.storage_index.fqn]
        chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        sizes, offsets, start = list(chunk.sizes), list(item.storage_offsets), chunk.start
        if sizes:  # only the requested rows, which are contiguous
            row_bytes = math.prod(sizes[1:]) * entry.itemsize
            start += offsets[0] * row_bytes
            sizes[0], offsets[0] = item.lengths[0], 0
        length = math.prod(sizes) * entry.itemsize
        key = f"{self._name}/{self._manifest.files[chunk.file].key}"
        data = self._bytes(key, start, length)
        tensor = data.view(getattr(torch, entry.dtype)).reshape(sizes)
        put_in_place(planner, item, tensor, offsets)

    def _bytes(self, key: str, start: int, length: int) -> torch.Tensor:
        """Return bytes of a file: uint8 [length]."""
        data = torch.empty(length, dtype=torch.uint8)
        if self._store.local_path(key) is not None:  # read into the tensor, without a copy
            with self._store.open(key) as stream:
                stream.seek(start)
                received = stream.readinto(data.numpy()) if length else 0  # type: ignore[attr-defined]
        else:
            content = self._store.read(key, start, length)
            received = len(content)
            data.numpy()[:received] = np.frombuffer(content, dtype=np.uint8)[:length]
        if received != length:
            raise CheckpointError(f"{received} bytes at {start}, expected {length}", where=self._store.at(key),
                                  fix="the file changed while it was read; start again")
        return data

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: no state is kept between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def load_planner() -> DefaultLoadPlanner:
    """Return the planner for `Reader`, which needs a flat state."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def put_in_place(planner: LoadPlanner, item: ReadItem, rows: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy one item into the tensor that is being loaded.

    Args:
        planner: the planner that made the item.
        item: what to copy.
        rows: a tensor that contains it.
        offsets: first index of the item in each dimension of `rows`.
    """
    for dimension, (offset, size) in enumerate(zip(offsets, item.lengths)):
        rows = rows.narrow(dimension, offset, size)
    target = planner.resolve_tensor(item).detach()
    target.copy_(rows)
    planner.commit_tensor(item, target)


def _contiguous(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.detach().contiguous()


def _elements(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes)


def _is_empty(item: WriteItem) -> bool:
    """Return whether the whole tensor has no element."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.size) == 0


def _file_order(item: WriteItem) -> tuple[Any, ...]:
    """Return the sort key of a part in the file: wide elements first, so that all are aligned; then name, offsets."""
    assert item.tensor_data is not None
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    return (-DTYPES[dtype][1], item.index.fqn, tuple(item.tensor_data.chunk.offsets))


def _described(item: WriteItem, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Return (name, dtype, shape) of a part for `safetensors_head`."""
    assert item.tensor_data is not None
    whole, chunk = item.tensor_data.size, item.tensor_data.chunk
    return part_name(item.index.fqn, whole, chunk.offsets, tensor.shape), dtype_name(tensor), tuple(tensor.shape)
