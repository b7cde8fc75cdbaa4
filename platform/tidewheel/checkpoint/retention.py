"""Which checkpoints may go. The newest intact one never does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidewheel.checkpoint.commit import writer_of
from tidewheel.checkpoint.manifest import KEY
from tidewheel.checkpoint.verify import CheckpointInfo, list_checkpoints
from tidewheel.commit_log import CommitLog, epoch_of
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
        """Return the names of those to keep among `good`: complete, not known to be damaged, the newest last."""
        scored = sorted((info.validation_loss, info.step, info.name) for info in good
                        if info.validation_loss is not None)
        return ({info.name for info in good[-self.last:]} | {name for _, _, name in scored[:self.best]}
                | {info.name for info in good if self.every and info.step and info.step % self.every == 0})


@dataclass(frozen=True)
class Expired:
    """What may be deleted."""

    checkpoints: tuple[str, ...]
    """Whole folders."""
    objects: tuple[str, ...]
    """Files in kept folders that no manifest names: left by an attempt that was overtaken."""


def expired(found: Sequence[CheckpointInfo], *, committed: int, keep: Keep, damaged: Collection[str] = (),
            generation: int | None = None) -> Expired:
    """Return what may go once the checkpoint of step `committed` is in place.

    Files of a later worker group are never touched: whoever cleans up here may have been overtaken without knowing.
    Whatever an older epoch left uncommitted goes, as it can never be committed. Of the own epoch, and outside a run,
    what lies at a later step is left alone: the run was restored from before it, so it was refused as damaged or
    never committed; it is saved anew when the run comes by there again, and counts for nothing until then.

    Args:
        found: all checkpoints, the newest last.
        keep: complete ones to keep, up to and with `committed`.
        damaged: names of complete-looking ones whose content is known to be damaged.
        generation: the worker group that cleans up; None outside a run.
    """
    mine = [info for info in found if not _later(info.keys, generation)]
    past = [info for info in mine if info.step <= committed]
    good = [info for info in past if info.complete and info.name not in damaged]
    kept = keep.names(good)
    gone = [info for info in mine if info.name not in kept
            and (info.step < committed or (not info.committed and _fenced(info.keys, generation)))]
    stray = [key for info in past if info.name in kept and info.step < committed
             for key in info.keys if key.partition("/")[2] not in info.files]
    return Expired(tuple(info.name for info in gone), tuple(stray))


def _later(keys: Sequence[str], generation: int | None) -> bool:
    """Return whether a later worker group wrote any of these files."""
    writers = [writer_of(key) for key in keys]
    return generation is not None and any(writer is not None and writer > generation for writer in writers)


def _fenced(keys: Sequence[str], generation: int | None) -> bool:
    """Return whether all who wrote these files are of older epochs, which can commit no more."""
    writers = [writer_of(key) for key in keys if not key.endswith(f"/{KEY}")]
    return generation is not None and all(
        writer is not None and epoch_of(writer) < epoch_of(generation) for writer in writers)


def collect(store: Store, *, committed: int, keep: Keep, damaged: Collection[str] = (),
            generation: int | None = None) -> None:
    """Delete what `expired` names.

    First the commit log lets it go, so that nobody begins to read it; of each checkpoint the manifest goes first, so
    that an interrupted deletion leaves no damaged checkpoint but a partial one.

    Raises:
        OwnershipError: another driver owns the run; nothing was deleted.
    """
    plan = expired(list_checkpoints(store), committed=committed, keep=keep, damaged=damaged, generation=generation)
    if generation is not None:
        CommitLog(store).retire(plan.checkpoints, epoch_of(generation))
    for name in plan.checkpoints:
        store.delete(f"{name}/{KEY}")
        store.delete_tree(name)
    for key in plan.objects:
        store.delete(key)


def give_up_abandoned(store: Store, committed: str) -> None:
    """Give up the writes that began before checkpoint `committed` was, and are not completed: killed writers left them.
    Its own ranks had completed theirs by then, and begin no others while it cleans up."""
    store.abort_uploads(before=store.written_at(f"{committed}/{KEY}"))
