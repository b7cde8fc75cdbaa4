"""`manifest.json` of a checkpoint: its files, the rule by which ranks share each tensor, and the run's own state.

A checkpoint exists when its manifest does. The manifest contains a hash of itself, so that damage to it is detected
like damage to the tensors. It is plain JSON, every field is checked, and reading it executes nothing.

The position of a part follows from the rule (`Sharding`) and the order of parts in a file, so the manifest of a
thousand ranks is as long as that of one but for its list of files. Parts of a checkpoint that memory agents wrote, or
an earlier version of Tidewheel, are listed one by one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tidewheel.checkpoint.sharding import Box
from tidewheel.checkpoint.tensor_entry import (
    Chunk,
    RankFile,
    TensorEntry,
    count,
    cuts_json,
    entry_json,
    own_parts,
    parse_entry,
)
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Store, content_hash, safe_key

KEY = "manifest.json"
FORMAT = 2
READABLE = (1, FORMAT)
"""Format 1 has no rules: it lists every part of every tensor."""
NAME = re.compile(r"step_(\d{8,18})(?:-g\d{1,18}(?:\.\d{1,4})?)?")
_HASH = re.compile(r"blake3-[0-9a-f]{64}")

def step_name(step: int, writer: str = "") -> str:
    """Return the name of the checkpoint of `step`: "step_00000100".

    Args:
        step: number of completed steps.
        writer: distinguishes writers that save the same step: "g3" gives "step_00000100-g3".
    """
    return f"step_{step:08d}" + (f"-{writer}" if writer else "")


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint.

    Raises:
        ValueError: it is not the name of a checkpoint.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return int(match[1])


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds."""

    step: int
    world_size: int
    """Number of ranks that wrote it; any number can read it."""
    time: float
    """When it was committed, seconds since 1970."""
    files: tuple[RankFile, ...]
    """Their keys are names inside the checkpoint's folder."""
    tensors: dict[str, TensorEntry]
    """By path in the state, "model/embedding.weight"."""
    extra: dict[str, Any]
    """The run's own state, JSON values."""
    generation: int = 0
    """Number of the worker group that wrote it; `commit_log.epoch_of` gives the epoch."""

    def chunks(self, name: str, wanted: Box | None = None) -> Iterator[Chunk]:
        """Yield the parts of a tensor that have an element of a box.

        This costs work for the files that hold these parts, and not for the others.

        Args:
            name: of the tensor.
            wanted: the box; None: the whole tensor.

        Raises:
            CheckpointError: a file is missing in the manifest, or has another length than its parts.
        """
        entry = self.tensors[name]
        wanted = wanted or Box.whole(entry.shape)
        if entry.shared is None:
            yield from (chunk for chunk in entry.chunks if chunk.box.common(wanted) is not None)
            return
        for rank, box in entry.shared.within(wanted):
            if rank not in self._index:
                raise self._damaged(f"no file of rank {rank}, which has a part of {name}")
            index = self._index[rank]
            yield Chunk(index, self._starts(index)[name], box.offsets, box.sizes)

    def parts(self, index: int) -> Iterator[tuple[str, Chunk]]:
        """Yield (name of the tensor, part) for each part in a file, in no particular order.

        Args:
            index: of the file in `files`.

        Raises:
            CheckpointError: the file has another length than its parts.
        """
        yield from self._listed.get(index, ())
        if self._has_rules:
            starts = self._starts(index)
            for name, box in own_parts(self.tensors, self.files[index].rank).items():
                yield name, Chunk(index, starts[name], box.offsets, box.sizes)

    @cached_property
    def _has_rules(self) -> bool:
        return any(entry.shared is not None for entry in self.tensors.values())

    @cached_property
    def _listed(self) -> dict[int, list[tuple[str, Chunk]]]:
        """Parts without a rule, by index of their file."""
        listed: dict[int, list[tuple[str, Chunk]]] = {}
        for name, entry in self.tensors.items():
            for chunk in entry.chunks:
                listed.setdefault(chunk.file, []).append((name, chunk))
        return listed

    @property
    def total_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def model_hash(self) -> str:
        """Return a hash of the model's tensors as they are stored, from the hashes of the files that hold them.

        A copy has the same hash. The same values saved by another number of ranks have another one.
        """
        stored = {name: [tensor.dtype, tensor.shape, *self._stored(tensor)]
                  for name, tensor in self.tensors.items() if name.startswith("model/")}
        if any(tensor.shared is not None for tensor in self.tensors.values()):
            stored["files"] = [[file.rank, file.hash] for file in self.files]
        return _self_hash(stored)

    def _stored(self, tensor: TensorEntry) -> list[Any]:
        if tensor.shared is None:
            return [[[self.files[chunk.file].hash, chunk.start, chunk.offsets] for chunk in tensor.chunks]]
        return [cuts_json(tensor.shared), tensor.shared.first]

    @cached_property
    def _index(self) -> dict[int, int]:
        """Index of the file of each rank."""
        return {file.rank: index for index, file in enumerate(self.files)}

    @cached_property
    def _known_starts(self) -> dict[int, dict[str, int]]:
        return {}

    def _starts(self, index: int) -> dict[str, int]:
        """Return the first byte of each tensor's part in a file."""
        known = self._known_starts.get(index)
        if known is not None:
            return known
        file = self.files[index]
        starts, end = {}, file.head
        for name, box in own_parts(self.tensors, file.rank).items():
            starts[name] = end
            end += box.elements * self.tensors[name].itemsize
        if end != file.bytes:
            raise self._damaged(f"{file.key} has {file.bytes} bytes; its parts end at {end}")
        self._known_starts[index] = starts
        return starts

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"manifest.json is damaged: {what}", where=step_name(self.step),
                               fix="training skips it; delete this checkpoint's folder")

    def to_json(self) -> bytes:
        """Return the bytes of manifest.json, including the hash of itself."""
        values = {
            "format": FORMAT, "step": self.step, "world_size": self.world_size, "time": self.time,
            "files": [{"key": file.key, "bytes": file.bytes, "hash": file.hash, "rank": file.rank, "head": file.head}
                      for file in self.files],
            "tensors": {name: entry_json(tensor) for name, tensor in self.tensors.items()},
            "extra": self.extra, "generation": self.generation}
        return (json.dumps({**values, "manifest_hash": _self_hash(values)}, sort_keys=True) + "\n").encode()


def _self_hash(values: dict[str, Any]) -> str:
    return content_hash(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(store: Store, name: str) -> CheckpointManifest:
    """Return the manifest of checkpoint `name`, having checked every field.

    Raises:
        CheckpointError: there is none (the checkpoint was never committed), or it is damaged.
    """
    key = f"{name}/{KEY}"
    try:
        return parse_manifest(store.read(key), name, store.at(key))
    except FileNotFoundError:
        raise CheckpointError("not committed: there is no manifest.json", where=store.at(name),
                              fix="nothing to do: training uses the newest committed one") from None


def parse_manifest(data: bytes, name: str, where: str) -> CheckpointManifest:
    """Return the manifest in `data`, having checked every field.

    Args:
        data: content of manifest.json.
        name: the checkpoint.
        where: location for error messages.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.pop("manifest_hash", None) != _self_hash(values):
            raise ValueError("its content does not match its own hash")
        if values["format"] not in READABLE:
            raise ValueError(f"format {values['format']!r} is none of the known ones, {READABLE}")
        manifest = _build(values)
        if step_of(name) != manifest.step:
            raise ValueError(f"it is that of step {manifest.step}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, StorageError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CheckpointError(f"manifest.json is damaged: {reason}", where=where,
                              fix="training skips it; delete this checkpoint's folder") from None
    return manifest


def _build(values: dict[str, Any]) -> CheckpointManifest:
    files = []
    for index, file in enumerate(values["files"]):
        if "/" in safe_key(file["key"]) or not _HASH.fullmatch(file["hash"]):
            raise ValueError(f"the file {file['key']!r} is outside its folder or has no hash")
        files.append(RankFile(file["key"], count(file["bytes"]), file["hash"], count(file.get("rank", index)),
                              count(file.get("head", 0))))
    if len({file.rank for file in files}) < len(files):
        raise ValueError("two files are of one rank")
    tensors = {name: parse_entry(name, entry, files) for name, entry in values["tensors"].items()}
    if not isinstance(values["extra"], dict):
        raise ValueError("extra is not a JSON object")
    world_size = count(values["world_size"])
    ruled = [entry for entry in tensors.values() if entry.shared is not None]
    if any(entry.shared is not None and entry.shared.last >= world_size for entry in ruled):
        raise ValueError(f"a tensor is shared by more ranks than there are, {world_size}")
    parts = sum(math.prod(entry.shape) * entry.itemsize for entry in ruled)
    if ruled and parts + sum(file.head for file in files) != sum(file.bytes for file in files):
        raise ValueError("the tensors do not add up to the files")
    return CheckpointManifest(step=count(values["step"]), world_size=world_size, time=float(values["time"]),
                              files=tuple(files), tensors=tensors, extra=values["extra"],
                              generation=count(values.get("generation", 0)))
