"""A checkpoint's `manifest.json`: which bytes of which file are which part of which tensor, and the files' hashes.

It is written last, by one rank, after every rank's file is complete: without a valid one there is no checkpoint.
torch's own metadata is a pickle; this is JSON, so that nothing read from storage can run code.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Stamp, Store, content_hash, safe_key

MANIFEST_KEY = "manifest.json"
FORMAT = "tidewheel-checkpoint-1"
_NAME = re.compile(r"step_(\d{8,})$")


def checkpoint_name(step: int) -> str:
    """Folder of the checkpoint of `step`; names sort like steps."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint folder, None if `name` is not one."""
    found = _NAME.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes are: `start`, `bytes` in file number `file` of the manifest."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int
    bytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its torch dtype by name ("float32"), its whole shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds; keys of `files` are relative to the checkpoint's folder."""

    step: int
    world_size: int
    files: tuple[Stamp, ...]
    tensors: dict[str, TensorEntry]
    extra: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Length of all files together."""
        return sum(stamp.bytes for stamp in self.files)

    def to_json(self) -> dict[str, Any]:
        """JSON values, with a hash of their own so that damage to the manifest itself shows."""
        body = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return {**body, "hash": _self_hash(body)}


def _self_hash(body: dict[str, Any]) -> str:
    return content_hash(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_checkpoint_manifest(store: Store) -> CheckpointManifest:
    """The manifest of the checkpoint at `store`.

    Raises:
        FileNotFoundError: there is none: the checkpoint was never committed.
        CheckpointError: it is damaged, or a path in it leaves the checkpoint's folder.
    """
    try:
        body = store.read_json(MANIFEST_KEY)
        stated = body.pop("hash", None)
        if body.get("format") != FORMAT:
            raise ValueError(f"format is {body.get('format')!r}, expected {FORMAT!r}")
        if stated != _self_hash(body):
            raise ValueError("the manifest's own hash differs")
        files = tuple(Stamp(safe_key(entry["key"]), int(entry["bytes"]), str(entry["hash"])) for entry in body["files"])
        tensors = {name: TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(
            Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), chunk["file"], chunk["start"], chunk["bytes"])
            for chunk in entry["chunks"])) for name, entry in body["tensors"].items()}
        return CheckpointManifest(body["step"], body["world_size"], files, tensors, body["extra"])
    except FileNotFoundError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, UnicodeDecodeError, StorageError) as error:
        what = error.what if isinstance(error, StorageError) else str(error)
        raise CheckpointError(f"the manifest is damaged ({what})", where=store.at(MANIFEST_KEY),
                              mend="older checkpoints are tried by themselves; delete this one") from None


def write_checkpoint_manifest(store: Store, manifest: CheckpointManifest) -> Stamp:
    """Publish the checkpoint at `store`."""
    return store.write_json(MANIFEST_KEY, manifest.to_json())
