"""The protocol of a run's commit log, as plain generators: each yields one request to a store and is sent its answer.

Nothing here touches a store or a clock, so tests run every interleaving of two writers, with crashes, lost answers and
puts that land late. `commit_log` carries the requests out.

The log is a row of numbered slots. A slot is taken once: by a create that fails when the object exists, or, where a
store ignores that condition, by Disk Paxos (Gafni and Lamport, 2003) on objects that are written once under names of
their own. A take-over of the run is a record in the same row as the commits. So a writer that was taken over finds the
slot of its next commit gone; a look at a lease before the commit could not promise that, however short the time
between the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_SLOTS = 32
"""Older slots are deleted. A writer that slept through so many is told apart by a look at the row after its create."""
BALLOTS = 64
"""Tries of one slot without conditional creates, before the writer reports that another one keeps coming first."""


@dataclass(frozen=True)
class List:
    """Ask for the names of all objects of the log."""


@dataclass(frozen=True)
class Get:
    """Ask for the bytes of an object; None when there is none."""

    name: str


@dataclass(frozen=True)
class Create:
    """Write an object unless it exists; True when this request wrote it."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Put:
    """Write an object."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Delete:
    """Delete an object."""

    name: str


@dataclass(frozen=True)
class Pause:
    """Wait a random time before the try of number `attempt`, so that two writers do not stop each other for ever."""

    attempt: int


Request = List | Get | Create | Put | Delete | Pause
Protocol = Generator[Request, Any, Any]


class SlotsContested(Exception):
    """Other writers came first at every try. The same call may succeed later."""


def slot_name(number: int) -> str:
    """Return the name of a slot: "00000007.json"."""
    return f"{number:08d}.json"


def slot_numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of the slots among the names of a log, ascending."""
    return sorted(int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit() and name.endswith(".json"))


def newest() -> Protocol:
    """Return (number, record) of the newest slot; (-1, None) when the log is empty."""
    while True:
        numbers = slot_numbers((yield List()))
        if not numbers:
            return -1, None
        data = yield Get(slot_name(numbers[-1]))
        if data is not None:  # else newer slots have pushed it out since
            return numbers[-1], json.loads(data)


def append(number: int, record: dict[str, Any], writer: str, conditional: bool) -> Protocol:
    """Try to take slot `number` with `record`; return whether the slot holds this record and the row ends with it or
    goes on from it.

    Args:
        number: of the slot: the newest one the caller has seen, plus one.
        record: JSON values.
        writer: unique to this call. It tells this record from any other, also from an equal one.
        conditional: the store honours "create unless it exists".
    """
    data = json.dumps({**record, "number": number, "writer": writer}, sort_keys=True).encode()
    if conditional:
        yield from _create(number, data)
    else:
        yield from _decide(number, data, writer)
    # A slot that was deleted can be created once more. Then the row has gone on without this record.
    numbers = slot_numbers((yield List()))
    if numbers and numbers[-1] >= number + KEPT_SLOTS:
        return False
    held = yield Get(slot_name(number))
    return held == data


def _create(number: int, data: bytes) -> Protocol:
    """Create the slot. Whether it is ours is read from it: an answer may be that to a repeated request."""
    yield Create(slot_name(number), data)


def _decide(number: int, data: bytes, writer: str) -> Protocol:
    """Agree with all other writers on what slot `number` holds, and write it there.

    Each try has a ballot above all it has seen. The writer announces the ballot, looks at what was accepted under
    lower ones, accepts the value of the highest of them (its own when there is none), and looks again: when no higher
    ballot was announced by then, the value is decided. Every object is written once, so a put that lands late changes
    nothing that was decided.
    """
    prefix = f"ballots-{number:08d}/"
    for attempt in range(BALLOTS):
        if attempt:
            yield Pause(attempt)
        names = [name for name in (yield List()) if name.startswith(prefix)]
        ballot = 1 + max((_ballot(name) for name in names), default=0)
        mine = (ballot, writer)
        yield Put(f"{prefix}{ballot:06d}-{writer}.announced", b"")
        names = [name for name in (yield List()) if name.startswith(prefix)]
        if any(_owner(name) > mine for name in names):
            continue
        accepted = [name for name in names if name.endswith(".accepted") and _owner(name) < mine]
        value = data
        if accepted:
            value = yield Get(max(accepted, key=_owner))
            if value is None:  # tidied away: the row has gone on far beyond this slot
                return
        yield Put(f"{prefix}{ballot:06d}-{writer}.accepted", value)
        names = [name for name in (yield List()) if name.startswith(prefix)]
        if any(_owner(name) > mine for name in names):
            continue
        yield Put(slot_name(number), value)  # decided: whoever writes the slot writes these bytes
        return
    raise SlotsContested


def _ballot(name: str) -> int:
    return int(name.partition("/")[2][:6])


def _owner(name: str) -> tuple[int, str]:
    ballot, _, writer = name.partition("/")[2].rpartition(".")[0].partition("-")
    return int(ballot), writer


def take_over(expected: int, record: Callable[[int, dict[str, Any] | None], dict[str, Any]], writer: str,
              conditional: bool) -> Protocol:
    """Try to begin a new epoch behind slot `expected`; return its record, or None when the row has moved on.

    Args:
        expected: the newest slot the caller has decided on; -1 for an empty log.
        record: from the new epoch's number and the newest record to the record to append.
    """
    number, head = yield from newest()
    if number != expected:
        return None
    epoch = 0 if head is None else int(head["epoch"]) + 1
    mine = record(epoch, head)
    taken = yield from append(number + 1, mine, writer, conditional)
    return {**mine, "number": number + 1, "writer": writer} if taken else None


def commit(epoch: int, change: Callable[[dict[str, Any]], dict[str, Any] | None], writer: str,
           conditional: bool) -> Protocol:
    """Append a record of the owner of `epoch`; return (True, record), or (False, newest record) when another epoch
    has begun.

    Args:
        change: from the newest record to the one to append; None: nothing needs to be appended.
    """
    for attempt in range(BALLOTS):
        if attempt:
            yield Pause(attempt)
        number, head = yield from newest()
        if head is None or int(head["epoch"]) != epoch:
            return False, head
        mine = change(head)
        if mine is None:
            return True, head
        taken = yield from append(number + 1, mine, f"{writer}.{attempt}", conditional)
        if taken:
            return True, {**mine, "number": number + 1}
    raise SlotsContested


def tidy(number: int) -> Protocol:
    """Delete what no reader needs once slot `number` is the newest."""
    names = yield List()
    last = number - KEPT_SLOTS
    for name in names:
        slot = int(name[8:16]) if name.startswith("ballots-") else int(name[:8]) if name[:8].isdigit() else last + 1
        if slot <= last:
            yield Delete(name)
