"""Save the run's state while it goes on, and find the newest intact one when it comes back."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from tidewheel import storage
from tidewheel.checkpoint.commit import attempt_name, folder_name, publish
from tidewheel.checkpoint.dcp import Reader, StagedPlanner, Writer, load_planner
from tidewheel.checkpoint.manifest import KEY, CheckpointManifest, TensorEntry, step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.retention import Keep, collect, give_up_abandoned
from tidewheel.checkpoint.staging import Snapshot, Stage, dtype_name, flatten, local
from tidewheel.checkpoint.verify import list_checkpoints, locate, parse_text, verify_files
from tidewheel.errors import CheckpointError, OwnershipError, StorageAwayError, StorageError, TidewheelError
from tidewheel.storage import Stamp, Store
from tidewheel.time_limit import TimeLimit, bounded
from tidewheel.train.checkpoint_config import CheckpointConfig
from tidewheel.train.runtime import Saves

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]
T = TypeVar("T")

MOMENT_SECONDS = 1.0
"""Ranks that part wait this long for a save that is under way."""


class CheckpointManager:
    """The checkpoints of a run, written and read by all its ranks together (`train.runtime.Checkpointer`).

    A checkpoint is a folder `step_00000100` with one safetensors file for each rank and `manifest.json`, which rank 0
    writes last. All ranks call `save`, `load_latest` and `wait` in the same order. One save is in flight at a time: the
    next one waits for it. A save that fails or takes too long is reported; training goes on.

    Args:
        store: the run's `checkpoints` folder.
        keep_last, keep_best, keep_every: complete checkpoints to keep, see `retention.Keep`; others, and partial ones
            older than the newest, are deleted.
        on_event: called on rank 0 with ("commit", detail) when a checkpoint is published ("save" is the loop's: it was
            handed over), ("save_failed", detail), ("checkpoint_refused", detail) or ("cleanup_failed", detail); often
            from the uploading thread, so it must be quick.
        process_group: the ranks; default: torch.distributed's default group, or this process alone.
        asynchronous: upload in a thread; False: `save` returns when the checkpoint is committed.
        save_seconds: a save that takes longer has failed.
        max_failed: saves in a row that may fail; then `save` and `wait` raise. 0: any number.
        generation: number of the worker group, for a run that has an owner. None: a checkpoint outside a run.
    """

    def __init__(self, store: Store, *, keep_last: int = 3, keep_best: int = 0, keep_every: int = 0,
                 on_event: OnEvent | None = None, process_group: Any = None, asynchronous: bool = True,
                 save_seconds: float = 1800.0, max_failed: int = 0, generation: int | None = None) -> None:
        self.store, self._keep, self._asynchronous = store, Keep(keep_last, keep_best, keep_every), asynchronous
        self._max_failed, self._saves, self._reason = max_failed, Saves(), ""
        self._on_event, self._process_group = on_event, process_group
        self._generation = generation
        self._lost: OwnershipError | None = None
        self._made_peers: Peers | None = None
        self._stage = Stage()
        self._upload: threading.Thread | None = None
        self._copied, self._stalled = threading.Event(), 0.0
        self._copied.set()
        self._damaged: set[str] = set()
        self._save_seconds = save_seconds
        self._limit, self._broken_off, self._let_go = TimeLimit(), False, False
        self._finds_abandoned = True

    @classmethod
    def of(cls, store: Store, config: CheckpointConfig, on_event: OnEvent, *,
           generation: int | None) -> CheckpointManager:
        """Return the manager of worker group `generation` of a run, as the run's configuration says."""
        return cls(store, keep_last=config.keep_last, keep_best=config.keep_best, keep_every=config.keep_every,
                   on_event=on_event, asynchronous=config.asynchronous, max_failed=config.max_failed_saves,
                   save_seconds=config.save_seconds, generation=generation)

    @property
    def peers(self) -> Peers:
        """The ranks' own group; made once, by all ranks, at their first save or load."""
        if self._made_peers is None:
            self._made_peers = Peers(self._process_group, self._save_seconds)
        return self._made_peers

    # -- save ----------------------------------------------------------------------------------
    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Save `state`, a nested dict of tensors, and `extra`, JSON values (rank 0's counts), as of this call.

        Waits for the save before, if that is still under way. The state may change after `settle`: it is copied to
        host memory behind the training. Failures of storage do not raise here; see `on_event`.

        Raises:
            CheckpointError: the state holds something other than tensors, or `extra` is not JSON.
        """
        began = time.monotonic()
        peers, flat = self.peers, flatten(state)
        logger.debug("begins to save step %d", step)
        try:
            frozen = json.loads(json.dumps(extra))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra is not made of JSON values: {error}", where=f"checkpoint of step {step}",
                                  mend="give numbers, text, lists and dicts") from None
        self.wait()
        parts = {name: local(tensor) for name, tensor in flat.items()}
        snapshot, self._copied = Snapshot.of(parts.values()), threading.Event()
        self._saves, self._stalled = replace(self._saves, busy=True), 0.0

        def upload() -> None:
            staged: dict[str, torch.Tensor] | Exception
            try:
                staged = self._stage.copy(parts, snapshot)
            except Exception as error:  # of memory: the other ranks hear of it in the save
                staged = error
            self._copied.set()
            self._save(peers, step, flat, staged, frozen, began)

        if not self._asynchronous:
            upload()
            return
        # a daemon: a process that is told to stop must not wait for an upload
        self._upload = threading.Thread(target=upload, name=f"checkpoint-{step}", daemon=True)
        self._stalled = time.monotonic() - began
        self._upload.start()

    def settle(self) -> None:
        """Return once what was handed over to `save` may change."""
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self._stalled += time.monotonic() - began

    def wait(self) -> None:
        """Return once the save under way, if any, is committed or has failed for good.

        Raises:
            StorageError: too many in a row have failed, on all ranks.
            OwnershipError: another driver has taken the run over.
        """
        if self._upload is not None:
            self._upload.join()
            self._upload = None
        if self._lost is not None:
            raise self._lost
        if self._max_failed and self._saves.failed >= self._max_failed:
            raise StorageError(f"{self._saves.failed} saves in a row have failed, the last one so: {self._reason}",
                               where=self.store.uri, mend="see that the place can be written to, then start the run "
                               "again; checkpoint.max_failed_saves is the limit")

    def let_go(self) -> None:
        """End the save under way, if it is not over in a moment: its ranks part now, and the state is safe elsewhere.
        All of them call it."""
        if self._upload is None:
            return
        self._upload.join(MOMENT_SECONDS)
        if self._upload.is_alive():
            self._let_go = True
            self._limit.end("its workers make way")
            self._upload.join()  # each rank tells the others that it has stopped
        self._upload = None

    def break_off(self) -> None:
        """Stop the save under way at its next request or chunk, and save no more: its ranks are no longer together.
        From any thread; returns at once."""
        self._broken_off = True
        self._limit.end("its workers have parted")

    def _in_time(self, work: Callable[[], T]) -> T:
        """`work()`, within the limit of what is under way; storage that hangs cannot hold the calling thread."""
        return bounded(work, self._limit)

    def _begin(self, what: str) -> None:
        """A new time limit."""
        self._limit = TimeLimit(self._save_seconds, what)
        if self._broken_off:  # looked at after the limit is in place: `break_off` may come at any time
            self._limit.end("its workers have parted")

    def saves(self) -> Saves:
        """How saving goes."""
        return self._saves

    # a run without a memory tier keeps nothing but checkpoints
    def keeps(self, step: int) -> bool:
        return False

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        return

    def is_safe(self, step: int) -> bool:
        return False

    def _save(self, peers: Peers, step: int, flat: dict[str, torch.Tensor],
              staged: dict[str, torch.Tensor] | Exception, extra: dict[str, Any], began: float) -> None:
        """Write, commit, clean up; nothing raised here may reach the training."""
        self._let_go = False
        self._begin(f"the save of step {step}")
        name, generation = step_name(step), self._generation
        written: list[CheckpointManifest] = []

        def describe(files: tuple[Stamp, ...], tensors: dict[str, TensorEntry]) -> CheckpointManifest:
            written.append(CheckpointManifest(step, peers.size, time.time(), files, tensors, extra, generation or 0))
            return written[-1]

        try:
            name = peers.from_first(lambda: self._in_time(lambda: folder_name(self.store, step, generation)))
            writer = Writer(
                self.store, name, peers.rank, attempt_name(generation), persist=self._in_time, describe=describe,
                publish=lambda manifest: publish(self.store, name, manifest, owned=generation is not None))
            torch_checkpoint.save(dict(flat), storage_writer=writer, planner=StagedPlanner(staged),
                                  process_group=peers.group, no_dist=peers.alone)
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            seconds, self._reason = time.monotonic() - began, _reason(error)
            self._lost = _ownership(error)
            self._saves = Saves(self._saves.failed + 1, False, seconds, self._stall(seconds))
            kind = "save_abandoned" if self._let_go else "save_failed"
            self._event(kind, checkpoint=name, step=step, reason=self._reason, seconds=round(seconds, 3),
                        in_a_row=self._saves.failed)
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

    def _reads_back(self, peers: Peers, name: str, written: list[CheckpointManifest]) -> bool:
        """Return whether checkpoint `name` may be the only one there is: then its files are read back first.

        With more than one to keep there is another to fall back on, and a load verifies what it reads.
        """
        if self._keep.last > 1:
            return True
        files = peers.from_first(lambda: written[-1].files)
        try:
            mine = self._in_time(lambda: verify_files(self.store, name, files[peers.rank::peers.size]))
        except StorageError as error:  # the others wait for it
            mine = [_reason(error)]
        problems = [line for lines in peers.all(mine) for line in lines]
        if problems:
            self._event("checkpoint_refused", checkpoint=name, reason="; ".join(problems)[:500])
        return not problems

    def _stall(self, seconds: float) -> float:
        """For how long a save of `seconds` has kept the training waiting so far."""
        return self._stalled if self._asynchronous else seconds

    def _clean_up(self, step: int, name: str) -> None:
        self._begin("the clean-up")
        try:
            self._in_time(lambda: collect(self.store, committed=step, keep=self._keep, damaged=self._damaged,
                                          generation=self._generation))
        except (TidewheelError, OSError) as error:  # too many checkpoints do no harm; a lost run is found out elsewhere
            self._event("cleanup_failed", reason=_reason(error))
            return
        if not self._finds_abandoned:
            return
        try:
            self._in_time(lambda: give_up_abandoned(self.store, name))
        except (TidewheelError, OSError) as error:
            self._finds_abandoned = isinstance(error, StorageAwayError)  # else the store does not let us list them
            self._event("cleanup_failed", reason=_reason(error))

    # -- load ----------------------------------------------------------------------------------
    def load_latest(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fill the tensors of `state` in place from the newest intact checkpoint; resharded to the ranks there are.

        Every file of a checkpoint is read and its hash compared before it is used, the files shared out among the
        ranks, and all ranks take the same one. Damaged and partial ones are passed over, with an event each.

        Returns:
            The `extra` of that checkpoint, or None: nothing was ever committed here.

        Raises:
            CheckpointError: there are checkpoints but none is intact, or the state does not fit.
            StorageError: the store does not answer.
        """
        self.wait()
        peers, flat = self.peers, flatten(state)
        found = peers.from_first(lambda: [(info.name, info.committed, info.problem)
                                          for info in reversed(list_checkpoints(self.store))])
        refused = []
        for name, committed, problem in found:
            manifest, problems = self._inspect(peers, name, problem)
            if manifest is not None and not problems:
                self._load(peers, name, manifest, flat)
                return manifest.extra
            reason = "; ".join(problems)
            self._damaged.add(name)
            self._event("checkpoint_refused", checkpoint=name, reason=reason)
            if committed:
                refused.append(f"{name} ({reason})")
        if refused:
            raise CheckpointError(f"none of {len(refused)} checkpoints is intact: {', '.join(refused)[:500]}",
                                  where=self.store.uri, mend="restore one from a copy, or delete them all to begin "
                                  "the run anew")
        return None

    def load_saved(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """`load_latest`: there is nothing but what was saved."""
        return self.load_latest(state)

    def load_from(self, uri: str, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place from another run's checkpoint, each in its own dtype; called by all
        ranks. It may hold more than `state`.

        Args:
            uri: a run (its newest complete checkpoint) or RUN/checkpoints/step_00000100.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit.
        """
        peers, flat = self.peers, flatten(state)
        folder, name = peers.from_first(lambda: _place(uri))
        other = CheckpointManager(storage.store(folder), process_group=self._process_group)
        manifest, problems = other._inspect(peers, name, "")
        if manifest is None or problems:
            raise CheckpointError("; ".join(problems)[:500], where=f"{folder}/{name}",
                                  mend="start from another checkpoint; `tidewheel checkpoint verify RUN` shows which "
                                  "are intact")
        other._load(peers, name, manifest, flat, convert=True)

    def _inspect(self, peers: Peers, name: str, problem: str) -> tuple[CheckpointManifest | None, list[str]]:
        """The manifest, and what is wrong with the checkpoint; the same on all ranks."""
        if problem:
            return None, [problem]
        # one rank reads the manifest: a thousand requests for one object is what object stores throttle
        text = peers.from_first(lambda: self.store.read(f"{name}/{KEY}").decode())
        manifest = parse_text(self.store, name, text)
        mine: list[str] | StorageError
        try:
            mine = verify_files(self.store, name, manifest.files[peers.rank::peers.size])
        except StorageError as error:  # the others wait for it
            mine = error
        lines: list[str] = []
        for found in peers.all(mine):
            if isinstance(found, StorageError):
                raise found
            lines += found
        return manifest, lines

    def _load(self, peers: Peers, name: str, manifest: CheckpointManifest, flat: dict[str, torch.Tensor], *,
              convert: bool = False) -> None:
        where = self.store.at(name)
        misfits = [line for lines in peers.all(_misfits(manifest, flat, convert)) for line in lines]
        if misfits:
            raise CheckpointError("; ".join(dict.fromkeys(misfits))[:500], where=where,
                                  mend="give the model the shape it has there" if convert else
                                  "continue with the model and precision the run was started with")
        reader = Reader(self.store, name, manifest)
        try:
            torch_checkpoint.load(dict(flat), storage_reader=reader, planner=load_planner(),
                                  process_group=peers.group, no_dist=peers.alone)
        except CheckpointException as error:
            raise CheckpointError(f"cannot be read: {_reason(error)}", where=where,
                                  mend="start again; the checkpoint was intact when it was verified") from error

    def _event(self, kind: str, **detail: Any) -> None:
        logger.debug("%s %s", kind, detail)
        if self._on_event is not None and self.peers.rank == 0:
            self._on_event(kind, detail)


def _ownership(error: BaseException) -> OwnershipError | None:
    """Return the loss of the run among the causes of a failed save, if it is one."""
    if isinstance(error, CheckpointException):
        lost = [inner for inner, _ in error.failures.values() if isinstance(inner, OwnershipError)]
        return lost[0] if lost else None
    return error if isinstance(error, OwnershipError) else None


def _place(uri: str) -> tuple[str, str]:
    _, place, name = locate(uri)
    return place.uri, name


def _misfits(manifest: CheckpointManifest, flat: dict[str, torch.Tensor], convert: bool) -> list[str]:
    """What of the state the checkpoint does not have in the same shape and, unless it is converted, dtype."""
    lines = []
    for name, tensor in flat.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            lines.append(f"{name} is not in the checkpoint")
        elif entry.shape != tuple(tensor.shape) or not (convert or entry.dtype == dtype_name(tensor)):
            lines.append(f"{name} is {entry.dtype} {list(entry.shape)} in the checkpoint, "
                         f"{dtype_name(tensor)} {list(tensor.shape)} in the run")
    return lines


def _reason(error: BaseException) -> str:
    """One line about `error`; of a failure of several ranks, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_reason(inner)}"
    what = f"{error.where}: {error.what}" if isinstance(error, TidewheelError) else str(error)
    return what.splitlines()[0][:300] if what else type(error).__name__
