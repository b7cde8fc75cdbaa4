"""What each rank knows of its own collectives: which it started, in which order, and where its code stands.

torch's flight recorder (gloo and NCCL) numbers the collectives of each group and keeps the newest ones in memory. A
rank that makes no progress publishes them with its newest marks and its stack, so that `hang_blame` can compare ranks.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KEPT = 256
"""Newest collectives that a rank publishes."""
EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "all_gather", "_all_gather_base", "_allgather_base",
                         "reduce_scatter", "_reduce_scatter_base", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations whose inputs have one size on all ranks; those of others may differ."""
FRAMES = 6
"""Innermost frames of a stack that are published."""


class Entry(NamedTuple):
    """A collective that a rank started."""

    group: str
    """Name of the process group."""
    number: int
    """Number of the collective in its group, from 1."""
    what: str
    """Operation, sizes and dtypes."""


class MarkCount(NamedTuple):
    """Collectives that a rank had started when it made a mark."""

    mark: int
    step: int
    phase: str
    started: dict[str, int]
    """Number of collectives by group."""


@dataclass(frozen=True)
class RankRecord:
    """One rank's account of itself."""

    entries: tuple[Entry, ...] = ()
    """Collectives in the order in which it started them; the newest of them."""
    done: dict[str, int] | None = None
    """Number of the last collective of each group that has ended; None: not known."""
    marks: tuple[MarkCount, ...] = ()
    stack: tuple[str, ...] = ()
    """Where its training thread stands, innermost frame last."""
    program: int = 0
    """Ranks with the same number start the same collectives in the same order: those of one pipeline stage."""

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps([self.entries, self.done, self.marks, self.stack, self.program])

    @classmethod
    def from_json(cls, text: str | bytes) -> RankRecord:
        """Return the record that `to_json` wrote."""
        entries, done, marks, stack, program = json.loads(text)
        return cls(tuple(Entry(*entry) for entry in entries), done, tuple(MarkCount(*mark) for mark in marks),
                   tuple(stack), program)


def own_record(marks: Sequence[MarkCount], names: dict[str, str], program: int = 0) -> RankRecord:
    """Return this process's record.

    Args:
        marks: its newest marks.
        names: names of the groups by torch's names for them; others are left out.
        program: see `RankRecord`.
    """
    entries, done = recorded(names)
    return RankRecord(entries, done, tuple(marks), main_stack(), program)


def recorded(names: dict[str, str]) -> tuple[tuple[Entry, ...], dict[str, int] | None]:
    """Return the newest collectives in torch's flight recorder, and the last one of each group that has ended.

    Without a recorder, as before torch 2.7, there are none.

    Args:
        names: names of the groups by torch's names for them; others are left out.
    """
    dump_trace: Any = getattr(importlib.import_module("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if dump_trace is None:
        return (), None
    dump: dict[str, Any] = json.loads(dump_trace(includeCollectives=True, onlyActive=False))
    entries = []
    groups: dict[str, str] = {}
    for entry in dump.get("entries", ()):
        name = names.get(str(entry["process_group"][0]))
        if name is None or entry.get("is_p2p"):
            continue
        groups[str(entry["pg_id"])] = name
        operation = str(entry["profiling_name"]).rpartition(":")[2]
        what = operation
        if operation in EQUAL_SIZES:
            sizes = " ".join(str(size) for size in entry.get("input_sizes", ()))
            what = f"{operation} {sizes} {' '.join(entry.get('input_dtypes', ()))}"
        entries.append(Entry(name, int(entry["collective_seq_id"]), what))
    done = {groups[number]: int(status["last_completed_collective"])
            for number, status in dump.get("pg_status", {}).items() if number in groups}
    return _of_present_groups(entries)[-KEPT:], done


def _of_present_groups(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries without those of earlier groups of the same name, whose numbers are higher."""
    newest_first: list[Entry] = []
    least: dict[str, int] = {}
    for entry in reversed(entries):
        if entry.number < least.get(entry.group, entry.number + 1):
            least[entry.group] = entry.number
            newest_first.append(entry)
        else:
            least[entry.group] = 0  # all older ones are of the earlier group
    return tuple(reversed(newest_first))


def main_stack() -> tuple[str, ...]:
    """Return the innermost frames of the main thread: "file:line function"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ()
    frames = traceback.extract_stack(frame)[-FRAMES:]
    return tuple(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)
