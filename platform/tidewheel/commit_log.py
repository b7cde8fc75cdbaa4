"""The commit log of a run: which driver owns the run, in which epoch, and which checkpoints count.

One driver owns a run at a time. Each take-over starts a new epoch, and commits of older epochs fail. The log is in
`checkpoints/commits/`, one small numbered JSON object per record. The newest record holds everything that a reader
needs, so older ones are deleted. See `commit_protocol`.

The number of a worker group encodes its epoch: generation = epoch * GENERATIONS_PER_EPOCH + index.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tidewheel import commit_protocol as protocol
from tidewheel.commit_protocol import SlotsContested
from tidewheel.commit_record import Record
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import OwnershipError, StorageAwayError, StorageError
from tidewheel.lease import Holder
from tidewheel.retry import JITTER
from tidewheel.storage import Store

FOLDER = "commits"
GENERATIONS_PER_EPOCH = 1_000_000
TAKE_OVER, COMMIT, RETIRE, RELEASE = "take_over", "commit", "retire", "release"
DAMAGE_FIX = "delete the damaged record, which has the highest number; then the record before it counts"
"""What a user can do about a damaged record of a run."""
PAUSE_SECONDS = 0.05
"""Pauses between tries of a contested slot are random, up to this many seconds times the number of the try."""


def first_generation(epoch: int) -> int:
    """Return the number of an epoch's first worker group. The numbers of older epochs are smaller."""
    return epoch * GENERATIONS_PER_EPOCH


def epoch_of(generation: int) -> int:
    """Return the epoch in which the worker group with this number ran."""
    return generation // GENERATIONS_PER_EPOCH


@dataclass
class CommitLog:
    """Commit log in a run's `checkpoints` folder. Safe to use from several processes and threads.

    Every method raises StorageError if the store does not answer. The record may or may not have been appended then;
    calling the method again is safe.

    Args:
        checkpoints: the run's `checkpoints` folder.
    """

    checkpoints: Store
    _store: Store = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._store = self.checkpoints.child(FOLDER)

    def head(self) -> Record | None:
        """Return the newest record; None if the run has never had an owner."""
        number, values = self._run(protocol.newest())
        if values is None:
            return None
        with damage_named(self._store.at(protocol.slot_name(number)), DAMAGE_FIX):
            return Record.of({**values, "number": number})

    def take_over(self, owner: Holder, expected: Record | None, committed: Iterable[str] = (), *,
                  first_epoch: int = 0) -> Record | None:
        """Start a new epoch and return its record; None if the log has changed since `expected` was read.

        Args:
            owner: the new owner.
            expected: head of the log on which the caller based its decision.
            committed: names of the committed checkpoints, for a run without a log.
            first_epoch: number of the new epoch, for a run without a log.
        """
        now = time.time()
        conditional = creates_are_conditional(self._store)

        def record(epoch: int, head: dict[str, Any] | None) -> dict[str, Any]:
            epoch = epoch if head is not None else first_epoch
            former = None if head is None else Record.of({"number": -1, **head})
            names = tuple(committed) if former is None else former.checkpoints
            generation = -1 if former is None else former.generation
            return Record(0, epoch, TAKE_OVER, owner, now, now, generation, names, conditional=conditional).values()

        number = -1 if expected is None else expected.number
        values = self._run(protocol.take_over(number, record, uuid.uuid4().hex, conditional))
        if values is None:
            return None
        self._run(protocol.tidy(values["number"]))
        return self._record(values)

    def commit(self, name: str, generation: int) -> Record:
        """Commit checkpoint `name`. Committing it again changes nothing.

        Args:
            name: name of the checkpoint. Its files and manifest are already written.
            generation: number of the worker group that wrote it.

        Raises:
            OwnershipError: another driver owns the run, or a later worker group has already committed.
        """
        stale: list[int] = []

        def change(head: Record) -> Record | None:
            stale.clear()
            if name in head.checkpoints:
                return None
            if generation < head.generation:
                stale.append(head.generation)
                return None
            return _next(head, COMMIT, generation=generation, checkpoints=(*head.checkpoints, name))

        head = self._change(epoch_of(generation), change)
        if stale:
            raise OwnershipError(f"worker group {stale[0]} has committed since; {name} is of group {generation}",
                                 where=self.checkpoints.uri, fix="nothing to do: the later group continues the run")
        return head

    def retire(self, names: Iterable[str], epoch: int) -> Record:
        """Remove checkpoints from the committed ones, so that their files can be deleted.

        Args:
            names: names of the checkpoints.
            epoch: epoch of the calling driver.

        Raises:
            OwnershipError: another driver owns the run.
        """
        retired = set(names)

        def change(head: Record) -> Record | None:
            kept = tuple(name for name in head.checkpoints if name not in retired)
            return None if kept == head.checkpoints else _next(head, RETIRE, checkpoints=kept)

        return self._change(epoch, change)

    def release(self, epoch: int) -> None:
        """Release the run, so that the next driver need not wait. Do nothing if another driver has taken it over."""
        try:
            self._change(epoch, lambda head: _next(head, RELEASE, released=True))
        except OwnershipError:
            return  # another driver owns the run

    # -- heartbeats --------------------------------------------------------------------------------
    def beat(self, epoch: int, count: int) -> None:
        """Write heartbeat number `count` of the owner of `epoch`."""
        self._store.write_json(_alive(epoch), {"beat": count, "time": time.time()})

    def last_beat(self, epoch: int) -> tuple[int, float]:
        """Return (count, Unix seconds) of the newest heartbeat of `epoch`; (-1, 0.0) before the first.

        Raises:
            StorageError: it is damaged.
        """
        name = _alive(epoch)
        try:
            values = self._store.read_json(name)
        except FileNotFoundError:
            return -1, 0.0
        try:
            return int(values["beat"]), float(values["time"])
        except (TypeError, KeyError, ValueError):
            raise StorageError(f"the owner's heartbeat is damaged: {str(values)[:60]}", where=self._store.at(name),
                               fix="delete it: an owner that is alive writes it again within seconds") from None

    def _change(self, epoch: int, change: Callable[[Record], Record | None]) -> Record:
        conditional = creates_are_conditional(self._store)

        def apply(values: dict[str, Any]) -> dict[str, Any] | None:
            record = change(Record.of({"number": -1, **values}))
            return None if record is None else record.values()

        kept, values = self._run(protocol.commit(epoch, apply, uuid.uuid4().hex, conditional))
        if not kept:
            raise taken_over(self.checkpoints.uri, None if values is None else self._record({"number": -1, **values}))
        head = self._record({"number": -1, **values})
        if head.number % protocol.KEPT_SLOTS == 0:
            self._run(protocol.tidy(head.number))
        return head

    def _record(self, values: dict[str, Any]) -> Record:
        with damage_named(self._store.uri, DAMAGE_FIX):
            return Record.of(values)

    def _run(self, steps: protocol.Protocol) -> Any:
        return run_protocol(self._store, steps)


def run_protocol(store: Store, steps: protocol.Protocol, *, damage_fix: str = DAMAGE_FIX) -> Any:
    """Execute the requests of a protocol and return its result.

    Args:
        store: the folder of the log.
        steps: the protocol.
        damage_fix: what the user can do about a damaged record.

    Raises:
        StorageError: the store does not answer, a record is damaged, or other writers came first at every try.
    """
    answer: Any = None
    try:
        with damage_named(store.uri, damage_fix):
            while True:
                answer = _execute(store, steps.send(answer))
    except StopIteration as stop:
        return stop.value
    except SlotsContested:
        raise StorageAwayError("other writers of this run came first at every try", where=store.uri,
                               fix="try again, and stop the other writer if it should not be running") from None


@contextlib.contextmanager
def damage_named(where: str, fix: str) -> Iterator[None]:
    """Say where a damaged record is, in a log or in an object of it, and what the user can do about it.

    Raises:
        StorageError: the block raised ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise StorageError(f"a record is damaged: {error}", where=where, fix=fix) from None


def _execute(store: Store, request: protocol.Request) -> Any:
    match request:
        case protocol.List():
            return [entry.key for entry in store.list()]
        case protocol.Get(name):
            try:
                return store.read(name)
            except FileNotFoundError:
                return None
        case protocol.Create(name, data):
            return store.create(name, data)
        case protocol.Put(name, data):
            return store.write(name, data)
        case protocol.Delete(name):
            return store.delete(name)
        case protocol.Pause(attempt):
            return time.sleep(JITTER.random() * PAUSE_SECONDS * min(attempt, 20))


def taken_over(where: str, head: Record | None) -> OwnershipError:
    """Return the error that ends a driver whose run has another owner.

    Args:
        where: URI of the run's checkpoints.
        head: newest record of the log; None if the log is gone.
    """
    if head is None:
        return OwnershipError("the run's commit log is gone", where=where,
                              fix="the folder was deleted during the run; start the run again")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(head.since))
    return OwnershipError(f"the run was taken over by {head.owner} at {since} (epoch {head.epoch})", where=where,
                          fix="everything that this driver writes is ignored; check the other driver, or start this "
                          "one again after the other has ended")


def _next(head: Record, kind: str, **changed: Any) -> Record:
    return Record(**{**vars(head), "kind": kind, "time": time.time(), **changed})


def _alive(epoch: int) -> str:
    return f"alive-{epoch:08d}.json"
