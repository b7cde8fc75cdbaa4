"""Own a run while training it: take it over, send heartbeats, and notice when another driver has taken it over.

A driver whose run has an owner checks whether that owner is alive. If the owner's process has ended, or it has released
the run, the driver takes over at once. If the owner sends heartbeats, the driver ends with an error that names it. If
the owner sends none for the duration of the lease, by the driver's own clock, the driver takes over. Clocks of two
machines are never compared, and safety does not depend on the lease: an owner that was only slow finds its next commit
refused (`commit_log`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tidewheel.commit_log import CommitLog, taken_over
from tidewheel.commit_record import Record
from tidewheel.errors import OwnershipError, StorageError
from tidewheel.lease import Holder
from tidewheel.storage import Store

CHECKPOINTS = "checkpoints"
CHECKS_PER_BEAT = 4
"""While a driver waits for a heartbeat, it checks this many times per interval."""


@dataclass(frozen=True)
class Timing:
    """Seconds between two heartbeats, and seconds without one after which the run can be taken over."""

    beat: float
    lease: float


LOCAL = Timing(2.0, 15.0)
REMOTE = Timing(10.0, 45.0)
"""Heartbeats are rarer on an object store, which bills each of them: 8,640 a day."""


def timing(run: Store) -> Timing:
    """Return the intervals for the kind of store that holds the run."""
    return LOCAL if run.local_path("run.json") is not None else REMOTE


def acquire(run: Store, *, committed: Callable[[], Iterable[str]] = tuple, force: bool = False,
            say: Callable[[str], None] | None = None, times: Timing | None = None,
            sleep: Callable[[float], Any] = time.sleep, clock: Callable[[], float] = time.monotonic) -> Record:
    """Take the run over and return the record of the new epoch.

    Args:
        run: the run's folder.
        committed: returns the names of the checkpoints of a run that predates commit logs.
        force: take over even if the owner is alive. The owner is fenced: nothing that it writes counts any more.
        say: called with one line of text if the driver has to wait to see whether the owner is alive.
        times: intervals; the default depends on the kind of store.
        sleep: replaces `time.sleep` in tests.
        clock: replaces `time.monotonic` in tests.

    Raises:
        OwnershipError: another driver owns the run and is alive.
        StorageError: the store does not answer.
    """
    log = CommitLog(run.child(CHECKPOINTS))
    times = times or timing(run)
    while True:
        head = log.head()
        if head is not None and not (force or _may_be_taken(log, head, run, times, say, sleep, clock)):
            continue  # the log has changed: check again
        if head is None:
            # Worker groups of a run that an older release started already have numbers of epoch 0.
            record = log.take_over(Holder.me(), None, committed(), first_epoch=int(run.exists("run.json")))
        else:
            record = log.take_over(Holder.me(), head)
        if record is not None:
            return record


def _may_be_taken(log: CommitLog, head: Record, run: Store, times: Timing, say: Callable[[str], None] | None,
                  sleep: Callable[[float], Any], clock: Callable[[], float]) -> bool:
    """Return True if the owner in `head` has ended, False if the log has changed; raise if the owner is alive."""
    if head.released or head.owner.is_gone():
        return True
    began = clock()
    seen = log.last_beat(head.epoch)
    if say is not None:
        say(f"{run.uri} is owned by {head.owner} since {_utc(head.since)}; "
            f"waiting up to {times.lease:g} s to see whether it is alive")
    while clock() - began < times.lease:
        sleep(times.beat / CHECKS_PER_BEAT)
        if head.owner.is_gone():
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
        f"the run is being trained by {head.owner} since {_utc(head.since)} (epoch {head.epoch}; last sign of life "
        f"{_utc(alive)})", where=run.uri,
        fix="wait for it or stop it, or choose another run.id; --take-over takes the run away from it: everything "
        "that the other driver writes is then ignored")


def _utc(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))


class Renewal:
    """Thread that sends heartbeats for the owner of `epoch`, and checks whether a newer epoch has started.

    Args:
        run: the run's folder.
        epoch: epoch of this driver.
        on_lost: called once, in the thread, with the error that names the new owner.
        times: intervals; the default depends on the kind of store.
    """

    def __init__(self, run: Store, epoch: int, on_lost: Callable[[OwnershipError], None], *,
                 times: Timing | None = None) -> None:
        self._log, self._epoch, self._on_lost = CommitLog(run.child(CHECKPOINTS)), epoch, on_lost
        self._times = times or timing(run)
        self._ended = threading.Event()
        self.lost: OwnershipError | None = None
        """The error that ended this driver's ownership; None while it owns the run."""
        self._thread = threading.Thread(target=self._renew, name="run owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sending heartbeats."""
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
                # The owner is unknown while the store is unavailable. Commits fail then, too, so this is safe.
                count += 1
            self._ended.wait(self._times.beat)


@contextlib.contextmanager
def owning(run: Store, *, committed: Callable[[], Iterable[str]] = tuple, force: bool = False,
           say: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Own the run during the block, and release it at the end, even if the block raises. See `acquire`.

    Args:
        run: the run's folder.
        committed: returns the names of the checkpoints of a run that predates commit logs.
        force: take over even if the owner is alive.
        say: called with one line of text if the driver has to wait to see whether the owner is alive.
    """
    record = acquire(run, committed=committed, force=force, say=say)
    try:
        yield record
    finally:
        with contextlib.suppress(StorageError):  # a run that is not released is free once its lease has expired
            CommitLog(run.child(CHECKPOINTS)).release(record.epoch)
