"""What each failure, drain and join cost: the time without a step, the steps done again, and worker seconds lost."""

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
    """What began at one moment and ended when the workers trained again."""

    begin: Event
    kinds: list[str] = field(default_factory=list)
    workers: tuple[int, int] = (0, 0)
    """Before and after; 0: nobody trained."""
    redone: int = 0
    """Steps."""
    pause: float = 0.0
    """Longest time without a step, seconds."""
    cost: dict[str, float] = field(default_factory=dict)
    """Worker seconds by category."""

    @property
    def name(self) -> str:
        """"node lost", "join + node lost": causes in order, without their consequences."""
        causes = [kind for kind in dict.fromkeys(self.kinds) if kind in CAUSES]
        if "node_lost" in causes and "failure" in causes:
            causes.remove("failure")
        return " + ".join(NAMES.get(kind, kind.replace("_", " ")) for kind in causes or self.kinds[:1])


def disturbances(events: Sequence[Event], metrics: Sequence[dict]) -> list[Disturbance]:
    """All there were, oldest first; the start of the run is the first one."""
    found: list[Disturbance] = []
    size, opened = 0, False
    for event in events:
        if event.kind not in CAUSES | CONSEQUENCES:
            continue
        if not opened:
            found.append(Disturbance(event, workers=(size, size)))
            opened = True
        current = found[-1]
        current.kinds.append(event.kind)
        for name, amount in event.cost.items():
            current.cost[name] = current.cost.get(name, 0.0) + amount
        if event.kind in ("start", "resume"):
            size = event.size or size
            current.workers, opened = (current.workers[0], size), False
            redo = event.detail.get("redo")
            current.redone += redo if isinstance(redo, int) else 0
    _pauses(found, metrics)
    return [each for each in found if each.pause or sum(each.cost.values()) >= 0.05 or "start" in each.kinds]


def _pauses(found: Sequence[Disturbance], metrics: Sequence[dict]) -> None:
    """The longest gap between two steps that each one falls into, or that comes before the next."""
    times = sorted(float(line["time"]) for line in metrics if "loss" in line and "time" in line)
    gaps = list(itertools.pairwise(times))
    for number, one in enumerate(found):
        if "start" in one.kinds:  # nothing trained before
            one.pause = max(0.0, times[0] - one.begin.time) if times else 0.0
            continue
        until = found[number + 1].begin.time if number + 1 < len(found) else float("inf")
        mine = [(before, after) for before, after in gaps if after > one.begin.time and before < until]
        one.pause = max((after - before for before, after in mine), default=0.0)


def disturbance_table(found: Sequence[Disturbance], began: float) -> Html:
    """A row for each, and their sum."""
    if not found:
        return Html("")
    used = [name for name in SHOWN if any(each.cost.get(name, 0) >= 0.05 for each in found)]
    rows: list[tuple[Any, ...]] = []
    for each in found[:AT_MOST]:
        before, after = each.workers
        rows.append((seconds(each.begin.time - began), f"{each.begin.step:,}", badge(each.name, _tone(each)),
                     f"{before or '–'} → {after or '–'}", seconds(each.pause), each.redone or "–",
                     *(_amount(each.cost.get(name, 0.0)) for name in used),
                     _amount(sum(each.cost.get(name, 0.0) for name in SHOWN))))
    whole = {name: sum(each.cost.get(name, 0.0) for each in found) for name in SHOWN}
    rows.append(("all", "", "", "", seconds(sum(each.pause for each in found)), sum(each.redone for each in found),
                 *(_amount(whole[name]) for name in used), _amount(sum(whole.values()))))
    head = ("time", "step", "what happened", "workers", "pause", "steps redone",
            *(name.replace("_", " ") for name in used), "worker time")
    return table(head, rows, numeric=(0, 1, *range(4, len(head))))


def _tone(each: Disturbance) -> str:
    return "bad" if {"node_lost", "failure"} & set(each.kinds) else "good" if "node_joined" in each.kinds else ""


def _amount(value: float) -> str:
    return seconds(value) if value >= 0.05 else "–"
