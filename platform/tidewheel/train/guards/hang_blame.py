"""Decide which ranks started a hang, from all ranks' records of their collectives.

Ranks run the same program, all or those of a pipeline stage, so their records agree up to where each of them stands. In
this order:

1. A rank that does not answer is stopped or gone: the others wait for it.
2. A rank whose history differs from that of most ranks took a wrong turn: another collective, another size, another
   order, one too few or too many. Collectives are compared one by one, and by which one of any group follows, so that
   an exchanged order of two groups shows. If all collectives look alike, their number at each mark tells.
3. Otherwise each rank in an unfinished collective waits for the ranks of its group that have not started it. Whoever
   waits for nobody while others wait is to blame: it computes, sleeps, or is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from tidewheel.train.guards.collective_records import Entry, RankRecord

T = TypeVar("T")
Key = tuple[str, int]
"""Kind of group, and number of a collective in it."""
Members = Mapping[str, tuple[int, ...]]
"""Ranks of each group, by its name."""


class Fault(StrEnum):
    """What a rank did."""

    SILENT = "does not answer"
    MISMATCH = "started another collective than the others"
    """Under the same number: nothing but a mistake explains it."""
    DIFFERENT = "took another way than the others"
    BEHIND = "did not start a collective that others wait in"


class Blamed(NamedTuple):
    """The ranks that started a hang."""

    ranks: tuple[int, ...] = ()
    fault: Fault | None = None
    text: str = ""
    """What they did, for people."""


NOBODY = Blamed()


def blame(records: Mapping[int, RankRecord | None], members: Members, kinds: Mapping[str, str] | None = None) -> Blamed:
    """Return the ranks that started a hang; nobody if the records do not tell.

    Args:
        records: of each rank; None for one that does not answer.
        members: ranks of each group.
        kinds: kind of each group; ranks of one program start the same collectives in their groups of a kind. Default:
            each group is of its own kind.
    """
    silent = tuple(sorted(rank for rank, record in records.items() if record is None))
    if silent:
        return Blamed(silent, Fault.SILENT, f"{_named(silent)} {Fault.SILENT}")
    known = {rank: record for rank, record in records.items() if record is not None}
    for program in sorted({record.program for record in known.values()}):
        alike = {rank: record for rank, record in known.items() if record.program == program}
        different = _different_collectives(alike, kinds or {}) or _different_counts(alike, kinds or {})
        if different is not None:
            return different
    return _behind(known, members)


def _different_collectives(records: Mapping[int, RankRecord], kinds: Mapping[str, str]) -> Blamed | None:
    """Return the ranks whose earliest collectives differ from those of most ranks."""
    whats: dict[Key, dict[int, str]] = {}
    followers: dict[Key, dict[int, Key]] = {}
    places: dict[int, dict[Key, int]] = {}
    for rank, record in records.items():
        before: Key | None = None
        places[rank] = {}
        for place, entry in enumerate(record.entries):
            key = (kinds.get(entry.group, entry.group), entry.number)
            places[rank][key] = place
            whats.setdefault(key, {})[rank] = entry.what
            if before is not None:
                followers.setdefault(before, {})[rank] = key
            before = key
    first: dict[int, tuple[int, Fault, str]] = {}
    for key, versions in whats.items():
        for rank, usual in _minority(versions):
            told = (places[rank][key], Fault.MISMATCH,
                    f"collective {_place(key)} is {versions[rank]}, on most ranks {usual}")
            first[rank] = min(first.get(rank, told), told)
    for key, following in followers.items():
        for rank, usual_next in _minority(following):
            told = (places[rank][key], Fault.DIFFERENT,
                    f"after {_place(key)} comes {_place(following[rank])}, on most ranks {_place(usual_next)}")
            first[rank] = min(first.get(rank, told), told)
    ranks = tuple(sorted(first))
    if not ranks or 2 * len(ranks) >= len(records):
        return None
    _, fault, text = first[ranks[0]]
    return Blamed(ranks, fault, f"{_named(ranks)} {fault}: {text}")


def _different_counts(records: Mapping[int, RankRecord], kinds: Mapping[str, str]) -> Blamed | None:
    """Return the ranks that had started another number of collectives at the earliest mark that shows it."""
    by_mark: dict[int, dict[int, Any]] = {}
    for rank, record in records.items():
        for mark in record.marks:
            started = {kinds.get(group, group): count for group, count in mark.started.items()}
            by_mark.setdefault(mark.mark, {})[rank] = (mark.step, mark.phase, tuple(sorted(started.items())))
    for number in sorted(by_mark):
        versions = by_mark[number]
        ranks = tuple(sorted(rank for rank, _ in _minority(versions)))
        if ranks and 2 * len(ranks) < len(records):
            step, phase, own = versions[ranks[0]]
            usual = next(version for rank, version in versions.items() if rank not in ranks)[2]
            return Blamed(ranks, Fault.DIFFERENT,
                          f"{_named(ranks)} {Fault.DIFFERENT}: at step {step} ({phase}) it had started "
                          f"{dict(own)} collectives, most ranks {dict(usual)}")
    return None


def _behind(records: Mapping[int, RankRecord], members: Members) -> Blamed:
    """Return the ranks that others wait for and that wait for nobody."""
    started = {rank: _newest(record.entries) for rank, record in records.items()}
    waits_for: dict[int, set[int]] = {}
    where: dict[int, Entry] = {}
    for rank, record in records.items():
        waits_for[rank] = set()
        entry = _unfinished(record, started, members)
        if entry is not None:
            where[rank] = entry
            waits_for[rank] = {other for other in members.get(entry.group, ())
                               if started.get(other, {}).get(entry.group, 0) < entry.number} - {rank}
    ranks = tuple(sorted(rank for rank, others in waits_for.items() if not others))
    waiting = [rank for rank in where if set(ranks) & waits_for[rank]]
    if not waiting:
        return NOBODY
    entry = where[waiting[0]]
    stack = records[ranks[0]].stack
    stands = f"; it stands at {' < '.join(reversed(stack[-3:]))}" if stack else ""
    return Blamed(ranks, Fault.BEHIND, f"{_named(ranks)} {Fault.BEHIND}: {entry.what} number {entry.number} of "
                  f"{entry.group}{stands}")


def _unfinished(record: RankRecord, started: Mapping[int, Mapping[str, int]], members: Members) -> Entry | None:
    """Return the first collective of a rank that some rank of its group has not started."""
    for entry in record.entries:
        if any(started.get(other, {}).get(entry.group, 0) < entry.number for other in members.get(entry.group, ())):
            return entry
    return None


def _newest(entries: Iterable[Entry]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for entry in entries:
        newest[entry.group] = max(newest.get(entry.group, 0), entry.number)
    return newest


def _minority(versions: Mapping[int, T]) -> list[tuple[int, T]]:
    """Return the ranks whose version is not that of most ranks, with that one; [] if no version has more than half."""
    usual, times = Counter(versions.values()).most_common(1)[0]
    if 2 * times <= len(versions):
        return []
    return [(rank, usual) for rank, version in versions.items() if version != usual]


def _place(key: Key) -> str:
    return f"number {key[1]} of {key[0]}"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)}"
