"""Attribute every second of every worker, from ledger.jsonl and events.jsonl.

Workers record what they do. A process that does not exist yet, or no longer exists, records nothing. This module fills
these gaps, so that each worker's intervals sum to its lifetime.

A generation starts at the end of the previous one or at the start of its driver. It ends with the failure or resize
event that ended it, or with its last record. It never overlaps the next generation or the next driver's time, because a
frozen worker may wake up and write a record long after the others continued without it. All workers of a generation
count for its whole duration. A gap

- before a worker's first record is `restart`: processes start and import, the process group forms, state loads;
- after its last record is `detection` if a failure ended the generation, `restart` after a planned resize, else `idle`;
- between records is `idle`.

A record of productive time says how much of it the steps waited for other workers (`train.metrics.waits`). That much,
at its end, is `communication`: time of steps that count, in which nothing was computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = ("productive", "communication", "redone", "data_wait", "save_stall", "detection", "restart", "idle")
COUNTED = ("productive", "communication")
"""Categories of the time in steps that count."""
ENDINGS = {"failure": "detection", "resize": "restart"}
DRIVER_START = "driver_start"
COORDINATOR_LOST = "coordinator_lost"
"""Event of a coordinator that the same driver started, after its DRIVER_START."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """One group of workers: its number, size, Unix times, and what ended it ("failure", "resize" or "")."""

    number: int
    workers: int
    start: float
    end: float
    ended_by: str = ""


@dataclass(frozen=True)
class LedgerSummary:
    """A run's time."""

    parts: dict[str, float]
    """Worker seconds by category; they sum to `worker_seconds`."""
    worker_seconds: float
    """Number of workers times duration, summed over generations."""
    wall_seconds: float
    """Duration of all generations, without the time between two drivers."""
    goodput: float
    """Share of the worker seconds in steps that count, 0 to 1: `productive` and `communication`."""
    generations: tuple[Generation, ...] = ()
    records: tuple[Record, ...] = field(default=(), repr=False)
    """The ledger with its gaps filled: rank, generation, node, category, start, end; no overlaps."""


def summarise(records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> LedgerSummary:
    """Attribute all time of all workers.

    Args:
        records: of ledger.jsonl: rank, generation, node, category, start, end (Unix seconds).
        events: of events.jsonl: time, kind, detail; used: failure, resize, resume, driver_start and
            coordinator_lost.
    """
    per_rank: dict[int, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        per_rank[int(record["generation"])][int(record["rank"])].append(record)
    drivers = _driver_starts(events)
    events_of: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        events_of[event["detail"].get("generation")].append(event)
    generations: list[Generation] = []
    filled: list[Record] = []
    free_from = float("-inf")
    firsts = {number: min(float(record["start"]) for records in ranks.values() for record in records)
              for number, ranks in per_rank.items()}
    numbers = sorted(per_rank)
    for index, number in enumerate(numbers):
        ranks = per_rank[number]
        is_last = index + 1 == len(numbers)
        latest_end = float("inf") if is_last else firsts[numbers[index + 1]]
        generation = _span(number, ranks, events_of[number], drivers, free_from, latest_end)
        generations.append(generation)
        free_from = generation.end
        for rank in range(generation.workers):
            filled += _fill(rank, sorted(ranks.get(rank, []), key=lambda record: record["start"]), generation)
    parts = dict.fromkeys(CATEGORIES, 0.0)
    for record in filled:
        parts[record["category"]] = parts.get(record["category"], 0.0) + record["end"] - record["start"]
    worker_seconds = sum((generation.end - generation.start) * generation.workers for generation in generations)
    wall_seconds = sum(generation.end - generation.start for generation in generations)
    goodput = sum(parts[name] for name in COUNTED) / worker_seconds if worker_seconds else 0.0
    return LedgerSummary(parts, worker_seconds, wall_seconds, goodput, tuple(generations), tuple(filled))


def _driver_starts(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return when drivers began. One that starts another coordinator has lived on, and its workers' time with it."""
    times: list[float] = []
    for event in events:
        if event["kind"] == DRIVER_START:
            times.append(float(event["time"]))
        elif event["kind"] == COORDINATOR_LOST and times:
            times.pop()
    return times


def _span(number: int, ranks: Mapping[int, Sequence[Mapping[str, Any]]], events: Sequence[Mapping[str, Any]],
          drivers: Sequence[float], free_from: float, latest_end: float) -> Generation:
    """Return when a generation began and ended, from its own records and events and the times of driver starts."""
    all_records = [record for records in ranks.values() for record in records]
    first = min(float(record["start"]) for record in all_records)
    last = max(float(record["end"]) for record in all_records)
    began = [at for at in drivers if free_from <= at <= first]
    # The last of `began` is this generation's driver. No worker existed between the previous generation and its start.
    start = max([free_from, *began[-1:]]) if began or free_from > float("-inf") else first
    endings = [event for event in events if event["kind"] in ENDINGS]
    sizes = [int(event["detail"].get("world_size", 0)) for event in events if event["kind"] in ("start", "resume")]
    end = max(last, float(endings[-1]["time"])) if endings else last
    start = min(start, first)
    end = max(start, min([end, latest_end, *(at for at in drivers if at > first)]))
    return Generation(number, max([max(ranks) + 1, *sizes]), start, end,
                      str(endings[-1]["kind"]) if endings else "")


def _fill(rank: int, records: Sequence[Mapping[str, Any]], generation: Generation) -> list[Record]:
    """Return one worker's records in one generation without gaps and overlaps."""
    node = str(records[0].get("node", "")) if records else ""
    after = ENDINGS.get(generation.ended_by, "idle")
    filled: list[Record] = []
    now = generation.start

    def spend(category: str, until: float) -> None:
        nonlocal now
        if until > now:
            filled.append({"rank": rank, "generation": generation.number, "node": node, "category": category,
                           "start": now, "end": until})
            now = until

    for record in records:
        spend("idle" if filled else "restart", min(float(record["start"]), generation.end))
        category, end = str(record["category"]), min(float(record["end"]), generation.end)
        if category == "productive" and (waited := float(record.get("waited", 0.0))) > 0:
            spend(category, max(now, end - waited))
            category = "communication"
        spend(category, end)
    spend(after, generation.end)
    return filled
