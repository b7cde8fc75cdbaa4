"""The protocol of a run's commit log, as plain generators. Each yields requests to a store and receives the answers.

Nothing here touches a store or a clock, so tests can run every interleaving of two writers, with crashes, lost answers
and puts that land late. `commit_log` executes the requests.

The log is a sequence of numbered slots. Each slot is written once: by a create that fails if the object exists, or, on
stores that ignore that condition, by Disk Paxos (Gafni and Lamport, 2003) on objects that are written once under unique
names. Take-overs and commits share the sequence, so a writer whose run was taken over finds the slot of its next commit
occupied. Checking a lease before the commit could not guarantee this, however short the time between the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_SLOTS = 32
"""Number of newest slots that are kept. A writer that slept through more of them notices it when it lists the log after
its create."""
BALLOTS = 64
"""Number of tries before a writer reports that other writers keep coming first."""


@dataclass(frozen=True)
class List:
    """Request for the names of all objects of the log."""


@dataclass(frozen=True)
class Get:
    """Request for the bytes of an object; the answer is None if it does not exist."""

    name: str


@dataclass(frozen=True)
class Create:
    """Request to write an object unless it exists; the answer is whether this request wrote it."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Put:
    """Request to write an object."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Delete:
    """Request to delete an object."""

    name: str


@dataclass(frozen=True)
class Pause:
    """Request to wait a random time before try number `attempt`, so that writers do not block each other forever."""

    attempt: int


Request = List | Get | Create | Put | Delete | Pause
Protocol = Generator[Request, Any, Any]


class SlotsContested(Exception):
    """Other writers came first at every try. The same call may succeed later."""


def slot_name(number: int) -> str:
    """Return the name of a slot: "00000007.json"."""
    return f"{number:08d}.json"


def slot_numbers(names: Sequence[str]) -> list[int]:
    """Return the slot numbers among the object names of a log, ascending."""
    return sorted(int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit() and name.endswith(".json"))


def newest() -> Protocol:
    """Return (number, record) of the newest slot; (-1, None) if the log is empty.

    Raises:
        ValueError: the slot has something else.
    """
    while True:
        numbers = slot_numbers((yield List()))
        if not numbers:
            return -1, None
        record = yield from read(numbers[-1])
        if record is not None:  # otherwise it was deleted meanwhile, because newer slots exist
            return numbers[-1], record


def read(number: int) -> Protocol:
    """Return the record of a slot; None if the slot is not written yet or was deleted.

    Raises:
        ValueError: the slot has something else.
    """
    data = yield Get(slot_name(number))
    if data is None:
        return None
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{slot_name(number)} is not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{slot_name(number)} is no record")
    return record


def append(number: int, record: dict[str, Any], writer: str, conditional: bool) -> Protocol:
    """Try to append `record` in slot `number`; return whether the record is part of the log now.

    Args:
        number: number of the slot: one more than the newest that the caller has seen.
        record: the record, as JSON values.
        writer: an id unique to this call, which distinguishes this record from an equal one.
        conditional: whether the store honours "create unless it exists".

    Raises:
        SlotsContested: other writers came first at every try.
    """
    data = json.dumps({**record, "number": number, "writer": writer}, sort_keys=True).encode()
    if conditional:
        yield from _create(number, data)
    else:
        yield from _decide(number, data, writer)
    # A deleted slot can be created once more; the log has then gone on without this record.
    numbers = slot_numbers((yield List()))
    if numbers and numbers[-1] >= number + KEPT_SLOTS:
        return False
    content = yield Get(slot_name(number))
    return content == data


def _create(number: int, data: bytes) -> Protocol:
    """Create the slot. The caller reads who won from the slot, because a repeated request gets a misleading answer."""
    yield Create(slot_name(number), data)


def _decide(number: int, data: bytes, writer: str) -> Protocol:
    """Agree with all other writers on the content of slot `number`, and write it.

    Each try has a higher ballot than all it has seen. The writer announces its ballot and lists what lower ballots have
    accepted. It accepts the value of the highest of these, or its own value if there is none, and lists again. If no
    higher ballot has been announced by then, the value is decided. Every object is written once, so a put that lands
    late changes nothing that was decided.
    """
    prefix = f"ballots-{number:08d}/"
    for attempt in range(BALLOTS):
        if attempt:
            yield Pause(attempt)
        names = [name for name in (yield List()) if name.startswith(prefix)]
        ballot = 1 + max((_ballot(name) for name in names), default=0)
        own_ballot = (ballot, writer)
        yield Put(f"{prefix}{ballot:06d}-{writer}.announced", b"")
        names = [name for name in (yield List()) if name.startswith(prefix)]
        if any(_owner(name) > own_ballot for name in names):
            continue
        accepted = [name for name in names if name.endswith(".accepted") and _owner(name) < own_ballot]
        value = data
        if accepted:
            value = yield Get(max(accepted, key=_owner))
            if value is None:  # deleted by `tidy`: the log has gone far beyond this slot
                return
        yield Put(f"{prefix}{ballot:06d}-{writer}.accepted", value)
        names = [name for name in (yield List()) if name.startswith(prefix)]
        if any(_owner(name) > own_ballot for name in names):
            continue
        yield Put(slot_name(number), value)  # decided: every writer of this slot writes these bytes
        return
    raise SlotsContested


def _ballot(name: str) -> int:
    return int(name.partition("/")[2][:6])


def _owner(name: str) -> tuple[int, str]:
    ballot, _, writer = name.partition("/")[2].rpartition(".")[0].partition("-")
    return int(ballot), writer


def take_over(expected: int, record: Callable[[int, dict[str, Any] | None], dict[str, Any]], writer: str,
              conditional: bool) -> Protocol:
    """Try to start a new epoch after slot `expected`; return its record, or None if the log has newer slots.

    Args:
        expected: newest slot that the caller has seen; -1 for an empty log.
        record: makes the record to append from the new epoch's number and the newest record.
        writer: an id unique to this call.
        conditional: whether the store honours "create unless it exists".
    """
    number, head = yield from newest()
    if number != expected:
        return None
    epoch = 0 if head is None else epoch_in(head) + 1
    values = record(epoch, head)
    appended = yield from append(number + 1, values, writer, conditional)
    return {**values, "number": number + 1, "writer": writer} if appended else None


def commit(epoch: int, change: Callable[[dict[str, Any]], dict[str, Any] | None], writer: str,
           conditional: bool) -> Protocol:
    """Append a record of the owner of `epoch`.

    Return (True, newest record), or (False, newest record) if another epoch has started.

    Args:
        epoch: epoch of the caller.
        change: makes the record to append from the newest record; returns None if nothing needs to be appended.
        writer: an id unique to this call.
        conditional: whether the store honours "create unless it exists".

    Raises:
        SlotsContested: other writers came first at every try.
    """
    for attempt in range(BALLOTS):
        if attempt:
            yield Pause(attempt)
        number, head = yield from newest()
        if head is None or epoch_in(head) != epoch:
            return False, head
        values = change(head)
        if values is None:
            return True, head
        appended = yield from append(number + 1, values, f"{writer}.{attempt}", conditional)
        if appended:
            return True, {**values, "number": number + 1}
    raise SlotsContested


def epoch_in(record: dict[str, Any]) -> int:
    """Return the epoch of a record.

    Raises:
        ValueError: it has none.
    """
    epoch = record.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool):
        raise ValueError(f"its epoch is {epoch!r}, not a number")
    return epoch


def tidy(number: int) -> Protocol:
    """Delete the objects that no reader needs after slot `number` is written."""
    names = yield List()
    last = number - KEPT_SLOTS
    for name in names:
        slot = int(name[8:16]) if name.startswith("ballots-") else int(name[:8]) if name[:8].isdigit() else last + 1
        if slot <= last:
            yield Delete(name)
