"""The commit log of a run: who owns the run, in which epoch, and which checkpoints count.

One driver owns a run at a time. Each take-over begins a new epoch; a commit of an older epoch fails, whatever its
writer believes. The log lies beside the checkpoints, in `checkpoints/commits/`: one small JSON object per record,
numbered. The newest record says everything a reader needs, so older ones are deleted. See `commit_protocol`.

The number of a worker group says in which epoch it ran: generation = epoch * GENERATIONS_PER_EPOCH + index.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tidewheel import commit_protocol as protocol
from tidewheel.commit_protocol import SlotsContested
from tidewheel.conditional_create import creates_are_conditional
from tidewheel.errors import OwnershipError, StorageAwayError, StorageError
from tidewheel.lease import Holder
from tidewheel.storage import Store

FOLDER = "commits"
GENERATIONS_PER_EPOCH = 1_000_000
TAKE_OVER, COMMIT, RETIRE, RELEASE = "take_over", "commit", "retire", "release"
PAUSE_SECONDS = 0.05


def first_generation(epoch: int) -> int:
    """Return the number of an epoch's first worker group; all numbers of older epochs are smaller."""
    return epoch * GENERATIONS_PER_EPOCH


def epoch_of(generation: int) -> int:
    """Return the epoch in which the worker group with this number ran."""
    return generation // GENERATIONS_PER_EPOCH


@dataclass(frozen=True)
class Record:
    """One record of the log; the newest one is the state of the run."""

    number: int
    """Slot in the row."""
    epoch: int
    """How often the run was taken over before."""
    kind: str
    """What was appended: take_over, commit, retire or release."""
    owner: dict[str, Any]
    """The driver that owns the run; fields of `lease.Holder`."""
    since: float
    """Unix seconds of the owner's take-over."""
    time: float
    """Unix seconds of this record."""
    generation: int = -1
    """Worker group of the newest commit; -1 before the first."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints that count, in the order of their commits."""
    released: bool = False
    """The owner has ended and given the run back."""
    conditional: bool = True
    """Slots are taken by conditional creates."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """Return the record in JSON values; unknown fields of later versions are left out."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "checkpoints": tuple(known.get("checkpoints", ()))})

    @property
    def holder(self) -> Holder:
        """The owner as a process."""
        return Holder(**self.owner)


@dataclass
class CommitLog:
    """The commit log below a run's `checkpoints` folder; safe to use from several processes and threads.

    Raises (all methods):
        StorageError: the store does not answer. Whether a record was appended is then unknown; calling again is safe.
    """

    checkpoints: Store
    _store: Store = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._store = self.checkpoints.child(FOLDER)

    def head(self) -> Record | None:
        """Return the newest record; None when the run never had an owner."""
        number, values = self._run(protocol.newest())
        return None if values is None else Record.of({**values, "number": number})

    def take_over(self, owner: Holder, expected: Record | None, committed: Iterable[str] = (), *,
                  first_epoch: int = 0) -> Record | None:
        """Begin a new epoch and return its record; None when the log has changed since `expected` was read.

        Args:
            owner: the new owner.
            expected: the head on which the caller decided.
            committed: names of the checkpoints that count in a run that has no log yet.
            first_epoch: number of the epoch in a run that has no log yet.
        """
        now = time.time()
        conditional = creates_are_conditional(self._store)

        def record(epoch: int, head: dict[str, Any] | None) -> dict[str, Any]:
            epoch = epoch if head is not None else first_epoch
            names = list(committed) if head is None else head["checkpoints"]
            generation = -1 if head is None else int(head["generation"])
            return _values(Record(0, epoch, TAKE_OVER, vars(owner), now, now, generation, tuple(names),
                                  conditional=conditional))

        number = -1 if expected is None else expected.number
        values = self._run(protocol.take_over(number, record, uuid.uuid4().hex, conditional))
        if values is None:
            return None
        self._run(protocol.tidy(values["number"]))
        return Record.of(values)

    def commit(self, name: str, generation: int) -> Record:
        """Make checkpoint `name` count. Committing it again changes nothing.

        Args:
            name: of a checkpoint whose files and manifest are written.
            generation: number of the worker group that wrote it.

        Raises:
            OwnershipError: another driver owns the run, or a later worker group has committed since.
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
                                 where=self.checkpoints.uri, fix="nothing to do: the later group goes on")
        return head

    def retire(self, names: Iterable[str], epoch: int) -> Record:
        """Let checkpoints `names` no longer count, so that their files can be deleted.

        Raises:
            OwnershipError: another driver owns the run.
        """
        gone = set(names)

        def change(head: Record) -> Record | None:
            kept = tuple(name for name in head.checkpoints if name not in gone)
            return None if kept == head.checkpoints else _next(head, RETIRE, checkpoints=kept)

        return self._change(epoch, change)

    def release(self, epoch: int) -> None:
        """Give the run back, so that the next driver need not wait. A run that was taken over is no error."""
        try:
            self._change(epoch, lambda head: _next(head, RELEASE, released=True))
        except OwnershipError:
            return  # the new owner has it

    # -- signs of life -----------------------------------------------------------------------------
    def beat(self, epoch: int, count: int) -> None:
        """Write the owner's sign of life number `count`."""
        self._store.write_json(_alive(epoch), {"beat": count, "time": time.time()})

    def last_beat(self, epoch: int) -> tuple[int, float]:
        """Return (count, Unix seconds) of the owner's newest sign of life; (-1, 0.0) before the first."""
        try:
            values = self._store.read_json(_alive(epoch))
        except FileNotFoundError:
            return -1, 0.0
        return int(values["beat"]), float(values["time"])

    def _change(self, epoch: int, change: Callable[[Record], Record | None]) -> Record:
        conditional = creates_are_conditional(self._store)

        def apply(values: dict[str, Any]) -> dict[str, Any] | None:
            record = change(Record.of({"number": -1, **values}))
            return None if record is None else _values(record)

        kept, values = self._run(protocol.commit(epoch, apply, uuid.uuid4().hex, conditional))
        if not kept:
            raise taken_over(self.checkpoints.uri, None if values is None else Record.of({"number": -1, **values}))
        head = Record.of({"number": -1, **values})
        if head.number % protocol.KEPT_SLOTS == 0:
            self._run(protocol.tidy(head.number))
        return head

    def _run(self, steps: protocol.Protocol) -> Any:
        """Carry out the requests of a protocol; what it returns."""
        answer: Any = None
        try:
            while True:
                answer = self._carry_out(steps.send(answer))
        except StopIteration as stop:
            return stop.value
        except ValueError as error:
            raise StorageError(f"a record is damaged: {error}", where=self._store.uri,
                               fix="delete the damaged record, the one with the highest number: the one before it "
                               "counts then") from None
        except SlotsContested:
            raise StorageAwayError("other writers of this run came first at every try", where=self._store.uri,
                                   fix="try again; stop the other writer if it is not meant to be there") from None

    def _carry_out(self, request: protocol.Request) -> Any:
        match request:
            case protocol.List():
                return [entry.key for entry in self._store.list()]
            case protocol.Get(name):
                try:
                    return self._store.read(name)
                except FileNotFoundError:
                    return None
            case protocol.Create(name, data):
                return self._store.create(name, data)
            case protocol.Put(name, data):
                return self._store.write(name, data)
            case protocol.Delete(name):
                return self._store.delete(name)
            case protocol.Pause(attempt):
                return time.sleep(random.random() * PAUSE_SECONDS * min(attempt, 20))


def taken_over(where: str, head: Record | None) -> OwnershipError:
    """Return the error that a driver ends with once its run has another owner."""
    if head is None:
        return OwnershipError("the run's commit log is gone", where=where,
                              fix="the folder was deleted while the run went on; start the run again")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(head.since))
    return OwnershipError(f"the run was taken over by {head.holder} at {since} (epoch {head.epoch})", where=where,
                          fix="nothing of this driver counts from then on; look at the other one, or start this one "
                          "again once the other has ended")


def _next(head: Record, kind: str, **changed: Any) -> Record:
    return Record(**{**vars(head), "kind": kind, "time": time.time(), **changed})


def _values(record: Record) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "number"}


def _alive(epoch: int) -> str:
    return f"alive-{epoch:08d}.json"
