"""Which checkpoints may go. The newest intact one never does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidewheel.checkpoint.manifest import KEY
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints
from tidewheel.storage import Store


@dataclass(frozen=True)
class Keep:
    """Which complete checkpoints are kept."""

    last: int = 3
    """The newest so many."""
    best: int = 0
    """The so many with the least validation loss, measured at their own step."""
    every: int = 0
    """All whose step is a multiple of this; 0: none."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or self.every < 0:
            raise ValueError(f"keep_last is at least 1, keep_best and keep_every 0; got {self}")

    def names(self, good: Sequence[CheckpointInfo]) -> set[str]:
        """Of complete checkpoints that are not known to be damaged."""
        by_step = sorted(good, key=lambda info: info.step)
        scored = sorted((info.validation_loss, info.step, info.name) for info in good
                        if info.validation_loss is not None)
        return ({info.name for info in by_step[-self.last:]} | {name for _, _, name in scored[:self.best]}
                | {info.name for info in by_step if self.every and info.step and info.step % self.every == 0})


@dataclass(frozen=True)
class Expired:
    """What may be deleted."""

    checkpoints: tuple[str, ...]
    """Whole folders."""
    objects: tuple[str, ...]
    """Files in kept folders that no manifest names: left by an attempt that was overtaken."""


def expired(found: Sequence[CheckpointInfo], *, committed: int, keep: Keep,
            damaged: Collection[str] = ()) -> Expired:
    """What may go once the checkpoint of step `committed` is in place.

    Whatever lies at a later step is left alone: the run was restored from before it, so it was refused as damaged or
    never committed; it is overwritten when the run comes by there again, and counts for nothing until then.

    Args:
        found: all checkpoints.
        keep: complete ones to keep, up to and with `committed`.
        damaged: names of complete-looking ones whose content is known to be damaged.
    """
    past = [info for info in found if info.step <= committed]
    good = [info for info in past if info.complete and info.name not in damaged]
    kept = keep.names(good)
    gone = [info for info in past if info.name not in kept and info.step < committed]
    stray = [key for info in past if info.name in kept and info.step < committed
             for key in info.keys if key.partition("/")[2] not in info.files]
    return Expired(tuple(info.name for info in gone), tuple(stray))


def collect(store: Store, *, committed: int, keep: Keep, damaged: Collection[str] = ()) -> None:
    """Delete what `expired` names. The manifest goes first, so that an interrupted deletion leaves no damaged
    checkpoint but a partial one."""
    plan = expired(list_checkpoints(store), committed=committed, keep=keep, damaged=damaged)
    for name in plan.checkpoints:
        store.delete(f"{name}/{KEY}")
        store.delete_tree(name)
    for key in plan.objects:
        store.delete(key)
