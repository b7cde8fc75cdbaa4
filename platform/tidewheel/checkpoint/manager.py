"""Save the run's state while training goes on, and load the newest intact checkpoint when the run resumes."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tidewheel.checkpoint import suspects
from tidewheel.checkpoint.agreement import Agreement
from tidewheel.checkpoint.commit import attempt_name, folder_name, publish
from tidewheel.checkpoint.loading import load_newest, load_step, load_uri, reason_of
from tidewheel.checkpoint.manifest import CheckpointManifest, step_name
from tidewheel.checkpoint.models import describe
from tidewheel.checkpoint.peers import Peers, RankError
from tidewheel.checkpoint.retention import Keep, abort_abandoned_uploads, collect
from tidewheel.checkpoint.shared_reading import Sharing
from tidewheel.checkpoint.staging import Snapshot, Stage, flatten, local
from tidewheel.checkpoint.tensor_entry import RankFile, TensorEntry
from tidewheel.checkpoint.verify import verify_files
from tidewheel.checkpoint.writing import write_checkpoint
from tidewheel.daemon import start_daemon
from tidewheel.errors import CheckpointError, OwnershipError, StorageAwayError, StorageError, TidewheelError
from tidewheel.storage import Store
from tidewheel.time_limit import TimeLimit, bounded
from tidewheel.train.checkpoint_config import CheckpointConfig
from tidewheel.train.runtime import Described, Keeps, Loaded, Saves

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]
T = TypeVar("T")

LET_GO_SECONDS = 1.0
"""Ranks that are about to part wait this long for a save under way."""


class CheckpointManager:
    """The checkpoints of a run, written and read by all its ranks together (`train.runtime.Checkpointer`).

    A checkpoint is a folder `step_00000100` with one safetensors file for each rank and `manifest.json`, which rank 0
    writes last. All ranks call `save`, `load_latest` and `wait` in the same order. One save is in flight at a time: the
    next one waits for it. A save that fails or takes too long is reported; training goes on.

    Args:
        store: the run's `checkpoints` folder.
        keep_last: number of newest checkpoints to keep, see `retention.Keep`. Others, and partial ones older than the
            newest, are deleted.
        keep_best: number of checkpoints with the lowest validation loss to keep.
        keep_every: keep the checkpoints of steps that are multiples of this; 0: none.
        on_event: called on rank 0 with ("commit", detail) when a checkpoint is published, ("save_failed", detail),
            ("save_abandoned", detail), ("checkpoint_refused", detail) or ("cleanup_failed", detail). It is often called
            from the uploading thread, so it must be quick. ("save" is the training loop's event.)
        process_group: the ranks; default: torch.distributed's default group, or this process alone.
        asynchronous: upload in a thread; False: `save` returns when the checkpoint is committed.
        save_seconds: a save that takes longer has failed.
        max_failed: `save` and `wait` raise after this many failed saves in a row; 0: never.
        generation: number of the worker group, for a run that has an owner. None: a checkpoint outside a run.
        sharing: how ranks share reads of a checkpoint; default: each byte is read once for all.
    """

    def __init__(self, store: Store, *, keep_last: int = 3, keep_best: int = 0, keep_every: int = 0,
                 on_event: OnEvent | None = None, process_group: Any = None, asynchronous: bool = True,
                 save_seconds: float = 1800.0, max_failed: int = 0, generation: int | None = None,
                 sharing: Sharing | None = None) -> None:
        self.store = store
        self._keep = Keep(keep_last, keep_best, keep_every)
        self._asynchronous = asynchronous
        self._save_seconds, self._max_failed = save_seconds, max_failed
        self._on_event, self._process_group = on_event, process_group
        self._generation = generation
        self._sharing = sharing or Sharing()
        self._peers: Peers | None = None
        self._agreement = Agreement()
        self._stage = Stage()
        self._saves = Saves()
        self._last_failure = ""
        self._lost: OwnershipError | None = None
        self._upload: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._stalled = 0.0
        self._damaged: set[str] = set()
        self._limit = TimeLimit()
        self._broken_off = self._let_go = False
        self._lists_uploads = True

    @classmethod
    def of(cls, store: Store, config: CheckpointConfig, on_event: OnEvent, *,
           generation: int | None) -> CheckpointManager:
        """Return a manager with the settings of a run.

        Args:
            store: the run's `checkpoints` folder.
            config: the run's settings.
            on_event: see the class.
            generation: number of the worker group; None: a checkpoint outside a run.
        """
        return cls(store, keep_last=config.keep_last, keep_best=config.keep_best, keep_every=config.keep_every,
                   on_event=on_event, asynchronous=config.asynchronous, max_failed=config.max_failed_saves,
                   save_seconds=config.save_seconds, generation=generation, sharing=Sharing(config.shared_reads))

    @property
    def peers(self) -> Peers:
        """The ranks' own process group, which all ranks make together at their first save or load."""
        if self._peers is None:
            self._peers = Peers(self._process_group, self._save_seconds)
        return self._peers

    # -- save ----------------------------------------------------------------------------------
    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Save the state as it is at this call, after waiting for the previous save.

        The state must not change until `settle` returns; it is copied to host memory in the background. Failures of
        storage do not raise here; see `on_event`.

        Args:
            step: number of completed steps.
            state: nested dict of tensors.
            extra: JSON values; those of rank 0 are saved.

        Raises:
            CheckpointError: the state holds something other than tensors, or `extra` is not JSON.
            StorageError: too many saves in a row have failed.
            OwnershipError: another driver has taken the run over.
        """
        began = time.monotonic()
        peers, flat = self.peers, flatten(state)
        logger.debug("begins to save step %d", step)
        try:
            frozen = json.loads(json.dumps(extra))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra is not made of JSON values: {error}", where=f"checkpoint of step {step}",
                                  fix="give numbers, text, lists and dicts") from None
        self.wait()
        parts = {name: local(tensor) for name, tensor in flat.items()}
        snapshot = Snapshot.of(parts.values())
        self._copied = threading.Event()
        self._saves, self._stalled = replace(self._saves, busy=True), 0.0

        def upload() -> None:
            staged: dict[str, torch.Tensor] | Exception
            try:
                staged = self._stage.copy(parts, snapshot)
            except Exception as error:  # out of memory, say: `_save` passes it on to the other ranks
                staged = error
            self._copied.set()
            self._save(peers, step, flat, staged, frozen, began)

        if not self._asynchronous:
            upload()
            return
        self._stalled = time.monotonic() - began
        self._upload = start_daemon(upload, f"checkpoint-{step}")

    def settle(self) -> None:
        """Return once the state given to `save` may change."""
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self._stalled += time.monotonic() - began

    def wait(self) -> None:
        """Return once the save under way, if any, is committed or has failed.

        Raises:
            StorageError: too many saves in a row have failed, on all ranks.
            OwnershipError: another driver has taken the run over.
        """
        if self._upload is not None:
            self._upload.join()
            self._upload = None
        if self._lost is not None:
            raise self._lost
        if self._max_failed and self._saves.failed >= self._max_failed:
            raise StorageError(f"{self._saves.failed} saves in a row have failed; the last one: {self._last_failure}",
                               where=self.store.uri, fix="make sure that the folder can be written to, then start the "
                               "run again; checkpoint.max_failed_saves is the limit")

    def let_go(self) -> None:
        """Stop the save in progress unless it is about to finish: its generation ends, and another tier has the state.

        All ranks call this together.
        """
        if self._upload is None:
            return
        self._upload.join(LET_GO_SECONDS)
        if self._upload.is_alive():
            self._let_go = True
            self._limit.end("its workers stop for a change")
            self._upload.join()  # each rank tells the others that it has stopped
        self._upload = None

    def break_off(self) -> None:
        """Stop the save in progress at its next request or chunk, and prevent others: the generation has ended.

        Safe to call from any thread; returns at once.
        """
        self._broken_off = True
        self._limit.end("its workers have parted")

    def saves(self) -> Saves:
        """Return the state of saving: failures in a row, and the cost of the last save."""
        return self._saves

    def distrust(self, after: int, detail: dict[str, Any]) -> None:
        """Mark all states of later steps as suspect; see `suspects`. Called on rank 0.

        Args:
            after: the last step that is known good.
            detail: why, JSON values.

        Raises:
            StorageError: the mark cannot be written.
        """
        suspects.write(self.store, self._generation or 0, after, detail)

    # without a memory tier there are only checkpoints in storage
    def has_memory(self) -> bool:
        """Return False: there is no memory tier."""
        return False

    def keeps(self, step: int) -> bool:
        """Return False: there is no memory tier."""
        return False

    def may_keep(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def keeping(self) -> Keeps:
        """Return that nothing is kept."""
        return Keeps()

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Do nothing, since there is no memory tier.

        Args:
            step: step of the state.
            state: tensors by name.
            extra: JSON values.
        """

    def is_safe(self, step: int) -> bool:
        """Return False: there is no memory tier."""
        return False

    # -- load ----------------------------------------------------------------------------------
    def load_latest(self, state: dict[str, Any],
                    usable: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        """Fill the tensors of `state` in place from the newest intact checkpoint, resharded to the present ranks.

        Every file of a checkpoint is read and its hash compared; see `load_newest`. Damaged and partial checkpoints are
        skipped, each with an event.

        Args:
            state: nested dict of tensors.
            usable: called with the `extra` of a checkpoint, which is passed by if it returns False; None: all are.

        Returns:
            the `extra` of that checkpoint; None when nothing was ever committed, or `usable` refused a checkpoint and
            no other is left.

        Raises:
            CheckpointError: there are checkpoints but none is intact, or the state does not fit.
            StorageError: the store does not answer.
        """
        self.wait()
        return load_newest(self.store, self.peers, flatten(state), self._sharing, self._refuse, usable)

    def load_branch(self, uri: str, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `state` in place from another run's checkpoint of one step, which is only read.

        All ranks call this together. The state must be that of the other run.

        Args:
            uri: the other run.
            step: of the checkpoint.
            state: nested dict of tensors.

        Returns:
            the checkpoint's `extra`.

        Raises:
            CheckpointError: the run has no intact checkpoint of this step, or it does not fit.
            StorageError: the store does not answer.
        """
        return load_step(uri, step, self.peers, flatten(state), self._sharing)

    def rules(self, state: dict[str, Any]) -> dict[str, TensorEntry]:
        """Return the rule by which the ranks share each tensor of a state; all ranks call this together.

        Raises:
            CheckpointError: see `Agreement.rules`.
        """
        return self._agreement.rules(self.peers, flatten(state))

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Load from storage, as `load_latest` does."""
        return self.load_latest(state)

    def load_from(self, uri: str, state: dict[str, Any], head: str = "") -> Loaded:
        """Fill the tensors of `state` in place from another run's checkpoint, converted to their dtypes.

        All ranks call this together. The checkpoint may hold more tensors than `state`.

        Args:
            uri: a run (its newest complete checkpoint) or RUN/checkpoints/step_00000100.
            state: nested dict of tensors.
            head: see `load_uri`.

        Returns:
            which checkpoint it was.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or it does not fit.
            StorageError: the store does not answer.
        """
        return load_uri(uri, self.peers, flatten(state), self._sharing, head)

    def describe(self, uri: str) -> Described:
        """Return which decoder a checkpoint of another run holds; see `models.describe`. All ranks call it."""
        return self.peers.from_first(lambda: describe(uri))

    def _refuse(self, name: str, reason: str) -> None:
        self._damaged.add(name)
        self._event("checkpoint_refused", checkpoint=name, reason=reason)

    # -- the uploading thread ------------------------------------------------------------------
    def _begin_limit(self, what: str) -> None:
        """Start a new time limit."""
        self._limit = TimeLimit(self._save_seconds, what)
        if self._broken_off:  # checked once the limit is in place, as `break_off` may be called at any time
            self._limit.end("its workers have parted")

    def _in_time(self, work: Callable[[], T]) -> T:
        """Return `work()`, run within the current limit so that storage that hangs cannot hold the calling thread."""
        return bounded(work, self._limit)

    def _save(self, peers: Peers, step: int, flat: dict[str, torch.Tensor],
              staged: dict[str, torch.Tensor] | Exception, extra: dict[str, Any], began: float) -> None:
        """Write, commit and clean up. Nothing raised in here may reach the training."""
        self._let_go = False
        self._begin_limit(f"the save of step {step}")
        name, generation = step_name(step), self._generation
        written: list[CheckpointManifest] = []

        def describe(files: tuple[RankFile, ...], tensors: dict[str, TensorEntry]) -> CheckpointManifest:
            written.append(CheckpointManifest(step, peers.size, time.time(), files, tensors, extra, generation or 0))
            return written[-1]

        try:
            name = peers.from_first(lambda: self._in_time(lambda: folder_name(self.store, step, generation)))
            write_checkpoint(
                self.store, name, peers, self._agreement, flat, staged, attempt_name(generation),
                persist=self._in_time, describe=describe,
                publish=lambda manifest: publish(self.store, name, manifest, owned=generation is not None))
        except Exception as error:
            self._fail(error, name, step, time.monotonic() - began)
            return
        seconds = time.monotonic() - began
        self._saves = Saves(0, False, seconds, self._stall(seconds))
        self._damaged.discard(name)
        if peers.rank == 0:
            manifest = written[-1]
            self._event("commit", checkpoint=name, step=step, bytes=manifest.total_bytes, files=len(manifest.files),
                        seconds=round(seconds, 3), stall_seconds=round(self._stall(seconds), 4))
        if not self._reads_back(peers, name, written):
            self._damaged.add(name)
        elif peers.rank == 0:
            self._clean_up(step, name)

    def _fail(self, error: BaseException, name: str, step: int, seconds: float) -> None:
        """Record and report a failed save."""
        self._last_failure = reason_of(error)
        self._lost = _ownership(error)
        self._saves = Saves(self._saves.failed + 1, False, seconds, self._stall(seconds))
        self._event("save_abandoned" if self._let_go else "save_failed", checkpoint=name, step=step,
                    reason=self._last_failure, seconds=round(seconds, 3), in_a_row=self._saves.failed)

    def _reads_back(self, peers: Peers, name: str, written: list[CheckpointManifest]) -> bool:
        """Return whether checkpoint `name` is good enough to delete older ones.

        When only one is kept, its files are read back first. Otherwise there is another to fall back on, and a load
        verifies what it reads.
        """
        if self._keep.last > 1:
            return True
        files = peers.from_first(lambda: written[-1].files)
        try:
            own = self._in_time(lambda: verify_files(self.store, name, files[peers.rank::peers.size]))
        except StorageError as error:  # the other ranks wait for this rank's answer
            own = [reason_of(error)]
        problems = [line for lines in peers.all(own) for line in lines]
        if problems:
            self._event("checkpoint_refused", checkpoint=name, reason="; ".join(problems)[:500])
        return not problems

    def _stall(self, seconds: float) -> float:
        """Return how long a save that took `seconds` has kept the training waiting."""
        return self._stalled if self._asynchronous else seconds

    def _clean_up(self, step: int, name: str) -> None:
        self._begin_limit("the clean-up")
        try:
            self._in_time(lambda: collect(self.store, committed=step, keep=self._keep, damaged=self._damaged,
                                          generation=self._generation))
        except (TidewheelError, OSError) as error:  # too many checkpoints do no harm; the next save notices a lost run
            self._event("cleanup_failed", reason=reason_of(error))
            return
        if not self._lists_uploads:
            return
        try:
            self._in_time(lambda: abort_abandoned_uploads(self.store, name))
        except (TidewheelError, OSError) as error:
            self._lists_uploads = isinstance(error, StorageAwayError)  # otherwise the store does not allow listing them
            self._event("cleanup_failed", reason=reason_of(error))

    def _event(self, kind: str, **detail: Any) -> None:
        logger.debug("%s %s", kind, detail)
        if self._on_event is not None and self.peers.rank == 0:
            self._on_event(kind, detail)


def _ownership(error: BaseException) -> OwnershipError | None:
    """Return the OwnershipError among the causes of a failed save, if there is one."""
    if isinstance(error, RankError):
        return _ownership(error.error)
    return error if isinstance(error, OwnershipError) else None
