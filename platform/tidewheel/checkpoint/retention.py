"""Which checkpoints may go. The newest intact one never does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidewheel.checkpoint.manifest import KEY
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints
from tidewheel.storage import Store


@dataclass(frozen=True)
class Expired:
    """What may be deleted."""

    checkpoints: tuple[str, ...]
    """Whole folders."""
    objects: tuple[str, ...]
    """Files in kept folders that no manifest names: left by an attempt that was overtaken."""


def expired(found: Sequence[CheckpointInfo], *, committed: int, keep_last: int,
            damaged: Collection[str] = ()) -> Expired:
    """What may go once the checkpoint of step `committed` is in place.

    Whatever lies at a later step is left alone: the run was restored from before it, so it was refused as damaged or
    never committed; it is overwritten when the run comes by there again, and counts for nothing until then.

    Args:
        found: all checkpoints.
        keep_last: complete ones to keep, up to and with `committed`.
        damaged: names of complete-looking ones whose content is known to be damaged.
    """
    past = [info for info in found if info.step <= committed]
    good = [info for info in past if info.complete and info.name not in damaged]
    kept = {info.name for info in sorted(good, key=lambda info: info.step)[-max(1, keep_last):]}
    gone = [info for info in past if info.name not in kept and info.step < committed]
    stray = [key for info in past if info.name in kept and info.step < committed
             for key in info.keys if key.partition("/")[2] not in info.files]
    return Expired(tuple(info.name for info in gone), tuple(stray))


def collect(store: Store, *, committed: int, keep_last: int, damaged: Collection[str] = ()) -> None:
    """Delete what `expired` names. The manifest goes first, so that an interrupted deletion leaves no damaged
    checkpoint but a partial one."""
    plan = expired(list_checkpoints(store), committed=committed, keep_last=keep_last, damaged=damaged)
    for name in plan.checkpoints:
        store.delete(f"{name}/{KEY}")
        store.delete_tree(name)
    for key in plan.objects:
        store.delete(key)
