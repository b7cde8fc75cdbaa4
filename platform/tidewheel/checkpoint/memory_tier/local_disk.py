"""Snapshots on the local disk of a node: what is left when all processes of a node have ended, the agent included.

The agent writes its workers' parts in a thread, each to a file of its own that is renamed when it is on the disk. The
next agent of the run on this machine serves them, so the workers find them among the other agents' parts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tidewheel.checkpoint.memory_tier import disk_file
from tidewheel.checkpoint.memory_tier.disk_file import SlotChanged
from tidewheel.checkpoint.memory_tier.part_store import Part, PartStore
from tidewheel.daemon import start_daemon
from tidewheel.errors import StorageError
from tidewheel.private_folders import is_private, private_folder

KEPT = 2
"""Steps that are kept of each worker: the other workers may not have the newest one yet. If a node falls further
behind, storage has the newest complete state (docs/checkpoints.md)."""
ABANDONED_SECONDS = 14 * 86400.0
"""Parts of another run whose newest file is older than this are deleted."""
PREFIX = "tidewheel-run-"
TEMPORARY = ".tmp-"
NAME = re.compile(r"step_(\d{8,18})-g(\d{1,18})-r(\d{1,9})\.safetensors")


@dataclass(frozen=True)
class _File:
    """A part's file."""

    path: Path
    generation: int
    step: int
    rank: int
    bytes: int


class LocalDisk:
    """The folder of one agent on the local disk. Safe to use from several threads.

    Args:
        folder: given by the user; folders of several runs and agents are in it.
        run: a short name of the run.
        store: the agent's parts, which get those on the disk.
        limit_bytes: most bytes that this agent's files may have; 0: as much as the disk has.

    Raises:
        StorageError: the folder is another user's, or cannot be created.
    """

    def __init__(self, folder: Path, run: str, store: PartStore, *, limit_bytes: int = 0) -> None:
        self._store, self._limit = store, limit_bytes
        base = private_folder(folder)
        self._run = base / f"{PREFIX}{run}"
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Part] = deque()
        self._writing: Part | None = None
        self._discards = 0
        self._closed = False
        self._problem = ""
        self.damaged: list[str] = []
        """What is wrong with files that earlier agents left."""
        self._locks: list[int] = []
        try:
            _sweep(base, self._run)
            self._own = self._new()
            self._adopted = self._adopt()
        except OSError as error:
            raise StorageError(f"cannot be used: {error.strerror or error}", where=str(self._run),
                               fix="choose another folder for checkpoint.local_disk, or change its owner") from None
        for file in self._files(*self._adopted):
            self._serve(file.path)
        start_daemon(self._work, "local disk")

    # -- writing -------------------------------------------------------------------------------
    def write(self, part: Part) -> None:
        """Write a part in the background."""
        with self._changed:
            self._queue.append(part)
            self._changed.notify_all()

    def busy(self, rank: int) -> bool:
        """Return whether a part of a worker is being written or waits for it."""
        with self._lock:
            pending = [*self._queue, *([self._writing] if self._writing is not None else [])]
            return any(part.content.rank == rank for part in pending)

    def wait(self) -> None:
        """Return once nothing is being written, and nothing will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._writing is None and (self._closed or not self._queue))

    def take_problem(self) -> str:
        """Return why the last write failed, once; "" if it did not."""
        with self._lock:
            problem, self._problem = self._problem, ""
            return problem

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                self._writing = part = self._queue.popleft()
                discards = self._discards
            try:
                self._write(part, discards)
            except (SlotChanged, StorageError, OSError) as error:
                with self._lock:
                    reason = getattr(error, "what", "") or getattr(error, "strerror", "") or str(error)
                    self._problem = f"step {part.content.step}: {reason}"

    def _write(self, part: Part, discards: int) -> None:
        content = part.content
        self._make_room(content.end, content.rank)
        name = f"step_{content.step:08d}-g{content.generation}-r{content.rank}.safetensors"
        path, temporary = self._own / name, self._own / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            disk_file.write(temporary, part)
            with self._lock:
                if self._discards != discards:
                    return
                os.replace(temporary, path)
            _fsync(self._own)
        finally:
            temporary.unlink(missing_ok=True)
        self._serve(path)
        self._prune(content.generation, content.rank)

    def _make_room(self, needed: int, rank: int) -> None:
        """Keep within the limit: the older step of the worker goes before the newest one is complete."""
        if not self._limit:
            return
        files = self._files(self._own, *self._adopted)
        for file in _oldest(files, rank, kept=1):
            if sum(other.bytes for other in files) + needed <= self._limit:
                return
            self._delete(file.path)
            files.remove(file)
        used = sum(file.bytes for file in files)
        if used + needed > self._limit:
            raise StorageError(f"{needed} bytes more than the {used} that are there exceed the limit, {self._limit}",
                               where=str(self._own), fix="raise checkpoint.local_disk.limit_bytes: a node needs twice "
                               "the state of its workers, and as much as a worker's part")

    def _prune(self, generation: int, rank: int) -> None:
        """Delete what newer files replace."""
        files = self._files(self._own)
        for file in _oldest(files, rank, kept=KEPT):
            self._delete(file.path)
        if len([file for file in files if (file.generation, file.rank) == (generation, rank)]) < KEPT:
            return
        for file in files:
            if file.generation < generation:
                self._delete(file.path)
        self._drop_adopted()

    # -- parts ---------------------------------------------------------------------------------
    def _serve(self, path: Path) -> None:
        try:
            self._store.add_from_disk(disk_file.read(path))
        except FileNotFoundError:
            return  # deleted meanwhile
        except (OSError, ValueError) as error:
            self.damaged.append(f"{path.name}: {error}")

    def _delete(self, path: Path) -> None:
        self._store.drop_from_disk(path)
        path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete all files: the run goes back to a checkpoint."""
        with self._lock:
            self._discards += 1
            self._queue.clear()
            folders = (self._own, *self._adopted)
        for file in self._files(*folders):
            self._delete(file.path)
        self._drop_adopted()

    def close(self, *, keep: bool) -> None:
        """Stop writing.

        Args:
            keep: leave the files to the next agent; False: the run is over, or storage has what is here.
        """
        with self._changed:
            self._closed = True
            self._discards += not keep
            self._changed.notify_all()
        if not keep:
            self.discard()
            shutil.rmtree(self._own, ignore_errors=True)
            with contextlib.suppress(OSError):  # another agent of the run, on the same machine, has files there
                self._run.rmdir()
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    # -- folders -------------------------------------------------------------------------------
    def _files(self, *folders: Path) -> list[_File]:
        """Return the files of parts in some folders."""
        files = []
        for folder in folders:
            try:
                paths = sorted(folder.iterdir())
            except FileNotFoundError:
                continue
            for path in paths:
                match = NAME.fullmatch(path.name)
                if match is None:
                    continue
                step, generation, rank = map(int, match.groups())
                with contextlib.suppress(FileNotFoundError):  # the other thread has just deleted it
                    files.append(_File(path, generation, step, rank, path.lstat().st_size))
        return files

    def _new(self) -> Path:
        """Create this agent's own folder, locked while the agent lives."""
        self._run.mkdir(0o700, exist_ok=True)
        if not is_private(self._run):
            raise PermissionError(errno.EPERM, "it is a link, another user's, or others can write to it")
        own = self._run / uuid.uuid4().hex
        hidden = self._run / f".{own.name}"  # locked before it gets the name that `_adopt` looks for
        hidden.mkdir(0o700)
        self._locks.append(_locked(hidden, create=True))
        hidden.rename(own)
        return own

    def _adopt(self) -> list[Path]:
        """Return the folders of dead agents of the run, locked by this one from now on."""
        adopted = []
        for folder in sorted(self._run.iterdir()):
            if folder == self._own or folder.name.startswith(".") or not is_private(folder):
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # its agent lives, or another one deletes it
                self._locks.append(_locked(folder))
                adopted.append(folder)
                for unfinished in folder.glob(f"{TEMPORARY}*"):
                    unfinished.unlink(missing_ok=True)
        return adopted

    def _drop_adopted(self) -> None:
        with self._lock:
            adopted, self._adopted = self._adopted, []
        for folder in adopted:
            for file in self._files(folder):
                self._store.drop_from_disk(file.path)
            shutil.rmtree(folder, ignore_errors=True)


def _oldest(files: list[_File], rank: int, *, kept: int) -> list[_File]:
    """Return the files of a worker without the newest ones, the oldest first."""
    own = sorted((file for file in files if file.rank == rank), key=lambda file: (file.generation, file.step))
    return own[:-kept]


def _locked(folder: Path, *, create: bool = False) -> int:
    """Return the descriptor of a folder's lock.

    Raises:
        BlockingIOError: another process has it.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _sweep(base: Path, own: Path) -> None:
    """Delete what runs have left that ended long ago."""
    for run in base.glob(f"{PREFIX}*"):
        if run == own or not is_private(run):
            continue
        if _in_use(run):
            continue
        newest = max((path.lstat().st_mtime for path in (run, *run.rglob("*"))), default=0.0)
        if time.time() - newest > ABANDONED_SECONDS:
            shutil.rmtree(run, ignore_errors=True)


def _in_use(run: Path) -> bool:
    """Return whether an agent of a run lives."""
    for folder in run.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.close(_locked(folder))
            except BlockingIOError:
                return True
    return False


def _fsync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
