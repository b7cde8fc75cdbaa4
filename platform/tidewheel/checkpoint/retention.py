"""Delete checkpoints that are no longer needed. The newest intact one is always kept."""

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
    """Which complete checkpoints to keep, beside the last one before a schedule's final decay (`train.continuing`)."""

    last: int = 3
    """Number of newest ones."""
    best: int = 0
    """Number of those with the lowest validation loss, measured at their own step."""
    every: int = 0
    """Keep all whose step is a multiple of this; 0: none."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or self.every < 0:
            raise ValueError(f"keep_last is at least 1, keep_best and keep_every 0; got {self}")

    def names(self, good: Sequence[CheckpointInfo]) -> set[str]:
        """Return the names of the checkpoints to keep. The newest that is known to be free of corruption is one.

        Args:
            good: complete checkpoints not known to be damaged, the newest last.
        """
        scored = sorted((info.validation_loss, info.step, info.name) for info in good
                        if info.validation_loss is not None)
        newest = {info.name for info in good[-self.last:]}
        continuable = {info.name for info in [info for info in good if info.before_decay][-1:]}
        best = {name for _, _, name in scored[:self.best]}
        verified = good[-1].verified if good else None
        known = [info.name for info in good if verified is not None and info.step <= verified][-1:]
        multiples = {info.name for info in good if self.every and info.step and info.step % self.every == 0}
        return newest | continuable | best | multiples | set(known)


@dataclass(frozen=True)
class Expired:
    """What can be deleted."""

    checkpoints: tuple[str, ...]
    """Whole folders."""
    objects: tuple[str, ...]
    """Files in kept folders that no manifest names, left by an attempt that lost to another."""


def expired(listed: Sequence[CheckpointInfo], *, committed: int, keep: Keep, damaged: Collection[str] = (),
            generation: int | None = None) -> Expired:
    """Return what can be deleted once the checkpoint of step `committed` is in place.

    Files of a later worker group are never deleted, because another driver may have taken the run over without this one
    knowing. Uncommitted files of an older epoch are deleted, because they can never be committed. Checkpoints of this
    epoch, or outside a run, at a later step than `committed` are left alone: the run was restored from before them, so
    they were refused as damaged or never committed, and the run saves that step again when it gets there.

    Args:
        listed: all checkpoints, the newest last.
        committed: the step that was just committed.
        keep: which complete checkpoints to keep, up to and including `committed`.
        damaged: names of complete checkpoints whose content is known to be damaged.
        generation: the worker group that cleans up; None outside a run.
    """
    own = [info for info in listed if not _later(info.keys, generation)]
    past = [info for info in own if info.step <= committed]
    good = [info for info in past if info.complete and info.name not in damaged]
    kept = keep.names(good)
    obsolete = [info for info in own if info.name not in kept
                and (info.step < committed or (not info.committed and _fenced(info.keys, generation)))]
    stray = [key for info in past if info.name in kept and info.step < committed
             for key in info.keys if key.partition("/")[2] not in info.files]
    return Expired(tuple(info.name for info in obsolete), tuple(stray))


def _later(keys: Sequence[str], generation: int | None) -> bool:
    """Return whether a later worker group wrote any of these files."""
    writers = [writer_of(key) for key in keys]
    return generation is not None and any(writer is not None and writer > generation for writer in writers)


def _fenced(keys: Sequence[str], generation: int | None) -> bool:
    """Return whether all writers of these files are of older epochs, which can no longer commit."""
    writers = [writer_of(key) for key in keys if not key.endswith(f"/{KEY}")]
    return generation is not None and all(
        writer is not None and epoch_of(writer) < epoch_of(generation) for writer in writers)


def collect(store: Store, *, committed: int, keep: Keep, damaged: Collection[str] = (),
            generation: int | None = None) -> None:
    """Delete what `expired` returns.

    The commit log drops the checkpoints first, so that nobody begins to read them. The manifest of each is deleted
    first, so that an interrupted deletion leaves a partial checkpoint rather than a damaged one.

    Args:
        store: the run's `checkpoints` folder.
        committed: the step that was just committed.
        keep: which complete checkpoints to keep.
        damaged: names of complete checkpoints whose content is known to be damaged.
        generation: the worker group that cleans up; None outside a run.

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


def abort_abandoned_uploads(store: Store, committed: str) -> None:
    """Abort incomplete multipart uploads that killed writers left.

    They are those that began before checkpoint `committed` was committed. Its own ranks had completed theirs by then,
    and begin no others during the clean-up.

    Args:
        store: the run's `checkpoints` folder.
        committed: name of the checkpoint.
    """
    store.abort_uploads(before=store.written_at(f"{committed}/{KEY}"))
