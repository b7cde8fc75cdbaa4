"""Our storage under torch's distributed checkpoint: it plans and reshards, we move the bytes.

Every rank streams its part into one safetensors file of its own, hashed on the way; rank 0 then publishes the manifest.
Reading takes byte ranges of those files, so a rank loads just what its layout needs.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tidewheel.checkpoint.manifest import (
    CheckpointManifest,
    Chunk,
    TensorEntry,
    write_checkpoint_manifest,
)
from tidewheel.errors import CheckpointError
from tidewheel.storage import Stamp, Store

# https://github.com/huggingface/safetensors#format
_SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
                torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
                torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS}


@dataclass(frozen=True)
class Written:
    """What a rank tells the coordinator about one item it wrote."""

    stamp: Stamp
    start: int
    bytes: int
    dtype: str


class StoreWriter(StorageWriter):
    """Writes one checkpoint of `step` to `store`.

    Args:
        store: the checkpoint's folder.
        step: optimizer steps done.
        world_size: ranks that write.
        extra: JSON values kept in the manifest.
        attempt: wraps a write that may fail for a while and is then tried again, as `attempt(write)`.
    """

    def __init__(self, store: Store, step: int, world_size: int, extra: dict[str, Any],
                 attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._store, self._step, self._world_size, self._extra = store, step, world_size, extra
        self._attempt = attempt
        self.manifest: CheckpointManifest | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """`prepare_global_plan` tells each rank its number."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, which names its file."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        # A name of its own for each attempt: what a killed attempt left can never be taken for this one's file.
        key = f"rank_{int(plan.storage_data or 0):05d}-{uuid.uuid4().hex[:8]}.safetensors"
        tensors = [(item, _resolve(item, planner)) for item in plan.items]
        future.set_result(self._attempt(lambda: self._write_file(key, tensors)))
        return future

    def _write_file(self, key: str, tensors: list[tuple[WriteItem, torch.Tensor]]) -> list[WriteResult]:
        if not tensors:
            return []
        header, spans = _header(tensors)
        with self._store.writer(key) as sink:
            sink.write(header)
            for _, tensor in tensors:
                sink.write(tensor.reshape(-1).view(torch.uint8).numpy())
        base = len(header)
        return [WriteResult(index=item.index, size_in_bytes=size, storage_data=Written(
                    sink.stamp, base + start, size, str(tensor.dtype).removeprefix("torch.")))
                for (item, tensor), (start, size) in zip(tensors, spans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator only, after every rank has written: publish."""
        flat = [result for part in results for result in part]
        stamps = sorted({result.storage_data.stamp for result in flat}, key=lambda stamp: stamp.key)
        number = {stamp.key: index for index, stamp in enumerate(stamps)}
        found = {(result.index.fqn, tuple(result.index.offset or ())): result.storage_data for result in flat}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor; checkpoints hold tensors, the rest goes into `extra`")
            parts = [(chunk, found[(name, tuple(chunk.offsets))]) for chunk in entry.chunks]
            tensors[name] = TensorEntry(parts[0][1].dtype, tuple(entry.size), tuple(
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), number[data.stamp.key], data.start, data.bytes)
                for chunk, data in parts))
        manifest = CheckpointManifest(self._step, self._world_size, tuple(stamps), tensors, self._extra)
        self._attempt(lambda: write_checkpoint_manifest(self._store, manifest))
        self.manifest = manifest

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _resolve(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    if item.type == WriteItemType.BYTE_IO:
        raise TypeError(f"{item.index.fqn} is not a tensor; checkpoints hold tensors, the rest goes into `extra`")
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().cpu().contiguous()


def _header(tensors: list[tuple[WriteItem, torch.Tensor]]) -> tuple[bytes, list[tuple[int, int]]]:
    """The head of a safetensors file, and (start, bytes) of each tensor behind it."""
    entries: dict[str, Any] = {}
    spans, place = [], 0
    for item, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        where = ",".join(str(offset) for offset in item.index.offset or ())
        entries[f"{item.index.fqn}@{where}"] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape),
                                                "data_offsets": [place, place + size]}
        spans.append((place, size))
        place += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


class StoreReader(StorageReader):
    """Reads the checkpoint that `manifest` describes from `store`."""

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        self._store, self._manifest = store, manifest
        self._where: dict[tuple[str, tuple[int, ...]], Chunk] = {
            (name, chunk.offsets): chunk for name, entry in manifest.tensors.items() for chunk in entry.chunks}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        state = {name: TensorStorageMetadata(
            properties=TensorProperties(dtype=_DTYPES[entry.dtype]), size=torch.Size(entry.shape),
            chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks],
        ) for name, entry in self._manifest.tensors.items()}
        places = {MetadataIndex(name, torch.Size(offsets)): chunk for (name, offsets), chunk in self._where.items()}
        return Metadata(state_dict_metadata=state, storage_data=places)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest is all there is to know."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each box once, however many parts of it this rank needs."""
        wanted: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        for item in plan.items:
            where = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            wanted.setdefault(where, []).append(item)
        for (name, offsets), items in wanted.items():
            box = self._read_box(name, self._where[(name, offsets)])
            for item in items:
                source = box
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                    source = source.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_box(self, name: str, chunk: Chunk) -> torch.Tensor:
        dtype = _DTYPES[self._manifest.tensors[name].dtype]
        if not chunk.bytes:
            return torch.empty(chunk.sizes, dtype=dtype)
        stamp = self._manifest.files[chunk.file]
        data = bytearray(self._store.read(stamp.key, chunk.start, chunk.bytes))
        if len(data) != chunk.bytes:
            raise CheckpointError(f"{stamp.key} ends before the bytes of {name}", where=self._store.uri,
                                  mend="older checkpoints are tried by themselves; delete this one")
        return torch.frombuffer(data, dtype=dtype).reshape(chunk.sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
