"""Commit a checkpoint: choose its folder, write its manifest, and append it to the run's commit log.

Each writer of a checkpoint (a worker group, or a memory agent on behalf of a lost group) uses file names of its own, so
two writers never touch each other's files. A checkpoint exists once the log names it. Does not import torch.
"""

from __future__ import annotations

import re
import uuid

from tidewheel.checkpoint.manifest import KEY, CheckpointManifest, parse_manifest, step_name
from tidewheel.commit_log import CommitLog
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import CheckpointError, OwnershipError
from tidewheel.storage import Store

_WRITER = re.compile(r"-g(\d{1,18})-[0-9a-f]{8}\.safetensors$")


def attempt_name(generation: int | None) -> str:
    """Return the part of a file's name that is unique to one attempt to save and contains the worker group's number."""
    return uuid.uuid4().hex[:8] if generation is None else f"g{generation}-{uuid.uuid4().hex[:8]}"


def writer_of(key: str) -> int | None:
    """Return the number of the worker group that wrote the file at `key`; None when its name does not say."""
    match = _WRITER.search(key)
    return int(match[1]) if match else None


def folder_name(store: Store, step: int, generation: int | None) -> str:
    """Return the name of the folder in which worker group `generation` saves `step`.

    Args:
        store: the run's `checkpoints` folder.
        step: number of completed steps.
        generation: number of the worker group; None for a checkpoint outside a run.
    """
    if generation is None:
        return step_name(step)
    names = [step_name(step), step_name(step, f"g{generation}")]
    # Where a create can overwrite, a late writer could replace the manifest, so names are never shared.
    usable = names if generation == 0 or creates_are_conditional(store) else names[1:]
    for name in usable:
        keys = [entry.key for entry in store.list(name)]
        if all(writer_of(key) == generation for key in keys):  # and there is no manifest
            return name
    return step_name(step, f"g{generation}.{uuid.uuid4().int % 10_000}")


def publish(store: Store, name: str, manifest: CheckpointManifest, *, owned: bool) -> None:
    """Write the manifest of a checkpoint whose files are written, and commit it.

    Args:
        store: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.
        owned: the run has an owner, whose epoch is that of `manifest.generation`. False: a checkpoint outside a run.

    Raises:
        OwnershipError: another driver owns the run, or a later worker group has committed.
        CheckpointError: another writer has written its manifest in this folder.
        StorageError: the store fails; calling again is safe.
    """
    log, key = CommitLog(store), f"{name}/{KEY}"
    if not owned:
        head = log.head()
        if head is not None:
            raise OwnershipError(f"the run belongs to {head.owner}; a checkpoint written beside it would be ignored",
                                 where=store.at(name), fix="write to a folder of its own")
        store.write(key, manifest.to_json())
        return
    if not store.create(key, manifest.to_json()):
        existing = parse_manifest(store.read(key), name, store.at(key))
        if existing.files != manifest.files:  # equal: the answer to an earlier request for this manifest was lost
            raise CheckpointError(f"worker group {existing.generation} has written its manifest here meanwhile",
                                  where=store.at(name), fix="nothing to do: the step is saved again beside it")
    log.commit(name, manifest.generation)
