"""PyTorch's distributed checkpointing over our storage: it plans who writes and reads which part, we move the bytes.

Each rank writes one file in the safetensors format, hashed while it streams; rank 0 then writes the manifest. torch's
own storage keeps its metadata as a pickle and has no hashes, hence ours.
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
"""Parts read at a time: on an object store it is the latency that counts."""

# said by torch in every single-process save and load; for us that is a use like any other
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor was written."""

    file: Stamp
    start: int


class StagedPlanner(DefaultSavePlanner):
    """Plans from the live state's shapes and shards, but takes the data from its staged copy.

    Args:
        staged: the copy, or why there is none: said where all ranks hear of it.
    """

    def __init__(self, staged: dict[str, torch.Tensor] | Exception) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def create_local_plan(self) -> SavePlan:
        """Without the empty parts that ranks have of tensors with fewer rows than ranks."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if _elements(item) or _is_empty(item)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if isinstance(self._staged, Exception):
            raise self._staged
        return self._staged[index.fqn]


class Writer(StorageWriter):
    """Writes checkpoint `name`: this rank's file, and on rank 0 the manifest.

    Args:
        store: the run's checkpoints.
        name: folder of this checkpoint.
        attempt: part of the file's name that no other attempt has, so that a checkpoint is never overwritten.
        describe: (files, tensors) to the manifest; called on rank 0.
        publish: writes the manifest and makes the checkpoint count; called on rank 0.
        persist: runs a write, within the time limit of the save.
    """

    def __init__(self, store: Store, name: str, rank: int, attempt: str, *, persist: Callable[[Callable[[], Any]], Any],
                 describe: Callable[[tuple[Stamp, ...], dict[str, TensorEntry]], CheckpointManifest],
                 publish: Callable[[CheckpointManifest], None]) -> None:
        self._store, self._name, self._describe, self._persist = store, name, describe, persist
        self._publish = publish
        self._file = f"rank_{rank:05d}-{attempt}.safetensors"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned parts; runs in the uploading thread already, so the future is done."""
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
        places = {(result.index.fqn, result.index.offset): result.storage_data for rank in results for result in rank}
        files = tuple(sorted({place.file for place in places.values()}, key=lambda file: file.key))
        number = {file.key: index for index, file in enumerate(files)}
        tensors = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for box in entry.chunks:
                place = places[fqn, box.offsets]
                chunks.append(Chunk(number[place.file.key], place.start, tuple(box.offsets), tuple(box.sizes)))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[fqn] = TensorEntry(dtype, tuple(entry.size), tuple(chunks))
        manifest = self._describe(files, tensors)
        self._persist(lambda: self._publish(manifest))

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads the parts this rank needs of checkpoint `name`, whose manifest was read and whose files were verified."""

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
        assert item.type == LoadItemType.TENSOR  # the manifest knows nothing else
        assert item.storage_index.offset is not None
        entry = self._manifest.tensors[item.storage_index.fqn]
        chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        sizes, offsets, start = list(chunk.sizes), list(item.storage_offsets), chunk.start
        if sizes:  # only the rows that are wanted; they lie together
            row_bytes = math.prod(sizes[1:]) * entry.itemsize
            start += offsets[0] * row_bytes
            sizes[0], offsets[0] = item.lengths[0], 0
        length = math.prod(sizes) * entry.itemsize
        key = f"{self._name}/{self._manifest.files[chunk.file].key}"
        data = self._bytes(key, start, length)
        tensor = data.view(getattr(torch, entry.dtype)).reshape(sizes)
        put_in_place(planner, item, tensor, offsets)

    def _bytes(self, key: str, start: int, length: int) -> torch.Tensor:
        """[length] uint8 of a file."""
        data = torch.empty(length, dtype=torch.uint8)
        if self._store.local_path(key) is not None:  # straight into place
            with self._store.open(key) as stream:
                stream.seek(start)
                found = stream.readinto(data.numpy()) if length else 0  # type: ignore[attr-defined]
        else:
            content = self._store.read(key, start, length)
            found = len(content)
            data.numpy()[:found] = np.frombuffer(content, dtype=np.uint8)[:length]
        if found != length:
            raise CheckpointError(f"{found} bytes at {start}, expected {length}", where=self._store.at(key),
                                  mend="the file changed while it was read; start again")
        return data

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def load_planner() -> DefaultLoadPlanner:
    """The planner that goes with `Reader`: the state is flat."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def put_in_place(planner: LoadPlanner, item: ReadItem, rows: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy what `item` wants, which begins at `offsets` of `rows`, into the tensor that is being loaded."""
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
    """The whole tensor has no element."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.size) == 0


def _file_order(item: WriteItem) -> tuple[Any, ...]:
    """Wide elements first, so that each lies at a multiple of its size; then by name and place."""
    assert item.tensor_data is not None
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    return (-DTYPES[dtype][1], item.index.fqn, tuple(item.tensor_data.chunk.offsets))


def _described(item: WriteItem, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    """A part, as `safetensors_head` wants it."""
    assert item.tensor_data is not None
    whole, chunk = item.tensor_data.size, item.tensor_data.chunk
    return part_name(item.index.fqn, whole, chunk.offsets, tensor.shape), dtype_name(tensor), tuple(tensor.shape)
