"""Own a run while training it: take it over, show signs of life, notice when somebody else has taken it.

A driver that finds an owner looks whether that one still lives. Its process has ended, or it gave the run back: the
driver takes over at once. It shows signs of life: the driver refuses and says who it is. It shows none for the lease's
time, by the driver's own clock: the driver takes over. No two machines' clocks are compared, and nothing depends on
the lease being right: an owner that was only slow finds its next commit refused (`commit_log`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tidewheel.commit_log import CommitLog, Record, taken_over
from tidewheel.errors import OwnershipError, StorageError
from tidewheel.lease import Holder
from tidewheel.storage import Store

CHECKPOINTS = "checkpoints"
LOOKS_PER_BEAT = 4


@dataclass(frozen=True)
class Timing:
    """Seconds between two signs of life, and how long an owner may show none before the run can be taken over."""

    beat: float
    lease: float


LOCAL = Timing(2.0, 15.0)
REMOTE = Timing(10.0, 45.0)
"""An object store bills each sign of life: 8,640 a day."""


def timing(run: Store) -> Timing:
    """Return the times that go with the kind of store a run is in."""
    return LOCAL if run.local_path("run.json") is not None else REMOTE


def acquire(run: Store, *, committed: Callable[[], Iterable[str]] = tuple, force: bool = False,
            say: Callable[[str], None] | None = None, times: Timing | None = None,
            sleep: Callable[[float], Any] = time.sleep, clock: Callable[[], float] = time.monotonic) -> Record:
    """Take the run over and return the record of the new epoch.

    Args:
        run: the run's folder.
        committed: names of the checkpoints of a run that was written before there were commit logs.
        force: do not look whether the owner lives. It is fenced off: nothing it writes counts from then on.
        say: called with one line when the owner has to be waited for.
        times: default: by the kind of store.

    Raises:
        OwnershipError: another driver owns the run and lives.
        StorageError: the store does not answer.
    """
    log = CommitLog(run.child(CHECKPOINTS))
    times = times or timing(run)
    while True:
        head = log.head()
        if head is not None and not (force or _may_be_taken(log, head, run, times, say, sleep, clock)):
            continue  # the log has changed: look again
        if head is None:
            # Worker groups of a run that an older version began have numbers of epoch 0 already.
            record = log.take_over(Holder.me(), None, committed(), first_epoch=int(run.exists("run.json")))
        else:
            record = log.take_over(Holder.me(), head)
        if record is not None:
            return record


def _may_be_taken(log: CommitLog, head: Record, run: Store, times: Timing, say: Callable[[str], None] | None,
                  sleep: Callable[[float], Any], clock: Callable[[], float]) -> bool:
    """Return True when the owner in `head` has ended, False when the log has changed; raise while it lives."""
    if head.released or head.holder.is_gone():
        return True
    began = clock()
    seen = log.last_beat(head.epoch)
    if say is not None:
        say(f"{run.uri} is owned by {head.holder} since {_utc(head.since)}; "
            f"looking for up to {times.lease:g} s whether it lives")
    while clock() - began < times.lease:
        sleep(times.beat / LOOKS_PER_BEAT)
        if head.holder.is_gone():
            return True
        newest = log.head()
        if newest is None or newest.number != head.number:
            if newest is not None and newest.epoch == head.epoch and not newest.released:
                raise _owned(run, newest, newest.time)
            return False
        beat = log.last_beat(head.epoch)
        if beat[0] != seen[0]:
            raise _owned(run, head, beat[1])
    return True


def _owned(run: Store, head: Record, alive: float) -> OwnershipError:
    return OwnershipError(
        f"the run is being trained by {head.holder} since {_utc(head.since)} (epoch {head.epoch}; last sign of life "
        f"{_utc(alive)})", where=run.uri,
        fix="wait for it or stop it, or choose another run.id; --take-over takes the run away from it: nothing the "
        "other driver writes counts from then on")


def _utc(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))


class Renewal:
    """A thread that shows signs of life for the owner of `epoch`, and looks whether a newer epoch has begun.

    Args:
        run: the run's folder.
        on_lost: called once, from the thread, with the error that says who has taken the run over.
    """

    def __init__(self, run: Store, epoch: int, on_lost: Callable[[OwnershipError], None], *,
                 times: Timing | None = None) -> None:
        self._log, self._epoch, self._on_lost = CommitLog(run.child(CHECKPOINTS)), epoch, on_lost
        self._times = times or timing(run)
        self._ended = threading.Event()
        self.lost: OwnershipError | None = None
        """Why the run is no longer this driver's."""
        self._thread = threading.Thread(target=self._renew, name="run owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show no more signs of life."""
        self._ended.set()

    def _renew(self) -> None:
        count = 0
        while not self._ended.is_set():
            try:
                self._log.beat(self._epoch, count)
                count += 1
                head = self._log.head()
                if head is None or head.epoch != self._epoch:
                    self.lost = taken_over(self._log.checkpoints.uri, head)
                    self._on_lost(self.lost)
                    return
            except StorageError:
                # Nothing is known while the store is away. Commits are refused then, too, so nothing can go wrong.
                count += 1
            self._ended.wait(self._times.beat)


@contextlib.contextmanager
def owning(run: Store, *, committed: Callable[[], Iterable[str]] = tuple, force: bool = False,
           say: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Own the run inside the block; give it back at the end, also when the block raises. See `acquire`."""
    record = acquire(run, committed=committed, force=force, say=say)
    try:
        yield record
    finally:
        with contextlib.suppress(StorageError):  # a run that is not given back is free once its lease has lapsed
            CommitLog(run.child(CHECKPOINTS)).release(record.epoch)
