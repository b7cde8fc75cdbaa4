"""Cost of each failure, drain and join: time without a step, repeated steps, and lost worker seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.report.events import CAUSES, CONSEQUENCES, LOST, Event
from tidewheel.report.page import Html, badge, seconds, table

NAMES = {"driver_start": "driver started", "node_draining": "drain", "node_joined": "join", "failure": "worker failed",
         "resize": "resize", "slow_worker": "slow worker"}
SHOWN = tuple(name for name in LOST if name != "save_stall")
AT_MOST = 300


@dataclass
class Disturbance:
    """One or several events, from the first one until the workers train again."""

    begin: Event
    end: float = float("inf")
    """Time at which training continued."""
    kinds: list[str] = field(default_factory=list)
    workers: tuple[int, int] = (0, 0)
    """Number of workers before and after; 0: none trained."""
    redone: int = 0
    """Steps done again."""
    pause: float = 0.0
    """Longest time without a step, seconds."""
    cost: dict[str, float] = field(default_factory=dict)
    """Worker seconds by category."""
    events: list[Event] = field(default_factory=list)
    """All its events, in order."""

    @property
    def name(self) -> str:
        """The causes in order, without their consequences: "node lost", "join + node lost"."""
        causes = [kind for kind in dict.fromkeys(self.kinds) if kind in CAUSES]
        if "node_lost" in causes and "failure" in causes:
            causes.remove("failure")
        return " + ".join(NAMES.get(kind, kind.replace("_", " ")) for kind in causes or self.kinds[:1])


def disturbances(events: Sequence[Event], metrics: Sequence[dict]) -> list[Disturbance]:
    """Return the disturbances that cost something, the oldest first. The start of the run is the first one."""
    return [disturbance for disturbance in grouped(events, metrics)
            if disturbance.pause or sum(disturbance.cost.values()) >= 0.05
            or not {"start", "rollback"}.isdisjoint(disturbance.kinds)]


def grouped(events: Sequence[Event], metrics: Sequence[dict]) -> list[Disturbance]:
    """Return all disturbances, the oldest first, also those that cost nothing."""
    all_disturbances: list[Disturbance] = []
    size, opened = 0, False
    for event in events:
        if event.kind == "rollback":
            if opened:  # workers are about to change, and train meanwhile
                all_disturbances[-1].redone += _undone(event)
            else:  # the same workers go back, so no event ends it
                all_disturbances.append(Disturbance(event, event.time, [event.kind], (size, size), _undone(event),
                                                    cost=dict(event.cost)))
            all_disturbances[-1].events.append(event)
            continue
        if event.kind not in CAUSES | CONSEQUENCES:
            continue
        if not opened:
            all_disturbances.append(Disturbance(event, workers=(size, size)))
            opened = True
        current = all_disturbances[-1]
        current.kinds.append(event.kind)
        current.events.append(event)
        for name, amount in event.cost.items():
            current.cost[name] = current.cost.get(name, 0.0) + amount
        if event.kind in ("start", "resume"):
            size = event.size or size
            current.workers, current.end, opened = (current.workers[0], size), event.time, False
            redo = event.detail.get("redo")
            current.redone += redo if isinstance(redo, int) else 0
    _pauses(all_disturbances, metrics)
    return all_disturbances


def _undone(rollback: Event) -> int:
    """Return the number of steps that a rollback undoes."""
    back_to = rollback.detail.get("back_to")
    return max(0, rollback.step - back_to) if isinstance(back_to, int) else 0


def _pauses(all_disturbances: Sequence[Disturbance], metrics: Sequence[dict]) -> None:
    """Set each disturbance's pause: the gap between two steps belongs to the first disturbance that overlaps it."""
    times = sorted(float(line["time"]) for line in metrics if "loss" in line and "time" in line)
    if all_disturbances and times:
        all_disturbances[0].pause = max(0.0, times[0] - all_disturbances[0].begin.time)
    at = 0
    for before, after in itertools.pairwise(times):
        while at < len(all_disturbances) and all_disturbances[at].end < before:
            at += 1
        if at < len(all_disturbances) and all_disturbances[at].begin.time < after:
            all_disturbances[at].pause = max(all_disturbances[at].pause, after - before)


def disturbance_table(shown: Sequence[Disturbance], began: float) -> Html:
    """Return a table with a row per disturbance, and their sum."""
    if not shown:
        return Html("")
    used = [name for name in SHOWN if any(disturbance.cost.get(name, 0) >= 0.05 for disturbance in shown)]
    rows: list[tuple[Any, ...]] = []
    for disturbance in shown[:AT_MOST]:
        before, after = disturbance.workers
        rows.append((seconds(disturbance.begin.time - began), badge(disturbance.name, _tone(disturbance)),
                     f"{before or '–'} → {after or '–'}", seconds(disturbance.pause), disturbance.redone or "–",
                     *(_amount(disturbance.cost.get(name, 0.0)) for name in used),
                     _amount(sum(disturbance.cost.get(name, 0.0) for name in SHOWN))))
    whole = {name: sum(disturbance.cost.get(name, 0.0) for disturbance in shown) for name in SHOWN}
    rows.append(("all", "", "", seconds(sum(disturbance.pause for disturbance in shown)),
                 sum(disturbance.redone for disturbance in shown),
                 *(_amount(whole[name]) for name in used), _amount(sum(whole.values()))))
    head = ("time", "what happened", "workers", "pause", "steps redone", *used, "all")
    return table(head, rows, numeric=(0, *range(3, len(head))))


def _tone(disturbance: Disturbance) -> str:
    if {"node_lost", "failure", "rollback"} & set(disturbance.kinds):
        return "bad"
    return "good" if "node_joined" in disturbance.kinds else ""


def _amount(value: float) -> str:
    return seconds(value) if value >= 0.05 else "–"
