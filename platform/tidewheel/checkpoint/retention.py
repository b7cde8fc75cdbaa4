"""Which checkpoints go when a new one is committed."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.checkpoint.manifest import MANIFEST_KEY, read_checkpoint_manifest
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints
from tidewheel.storage import Store


def expired(found: Sequence[CheckpointInfo], committed: int, keep_last: int) -> list[str]:
    """Names to delete once the checkpoint of step `committed` is published.

    The newest `keep_last` complete ones up to that step stay, so the one just written always does. Folders that were
    never committed go when they are older than it: a newer one may still be being written.
    """
    complete = [info for info in found if info.complete and info.step <= committed]
    kept = {info.name for info in complete[-keep_last:]}
    return [info.name for info in found if info.step <= committed and info.name not in kept
            and (info.complete or info.step < committed)]


def collect(place: Store, committed: int, keep_last: int) -> list[str]:
    """Delete what `expired` names, and files of `committed`'s folder that belong to an earlier attempt at it."""
    found = list_checkpoints(place)
    gone = expired(found, committed, keep_last)
    for name in gone:
        place.delete(f"{name}/{MANIFEST_KEY}")  # first: from here on it is no checkpoint, whatever happens next
        place.delete_tree(name)
    for info in found:
        if info.step == committed and info.complete:
            folder = place.child(info.name)
            known = {MANIFEST_KEY, *(stamp.key for stamp in read_checkpoint_manifest(folder).files)}
            for entry in folder.list():
                if entry.key not in known:
                    folder.delete(entry.key)
    return gone
