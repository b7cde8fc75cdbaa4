"""What happened to a run and what each event cost, from events.jsonl and ledger.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.report.training_plots import Mark

# What makes trainers stop and start. The rest follows from one of these, if one came before.
FAILURES = frozenset({"node_lost", "failure"})
CAUSES = FAILURES | {"driver_start", "node_draining", "node_joined"}
CONSEQUENCES = frozenset({"start", "resize", "resume"})
QUIET = frozenset({"save", "commit"})  # handed over, and published; many, so a row of the clock figure of their own
SAME_FAILURE_SECONDS = 30.0  # a lost node and the failure of its workers are noticed apart
GUARD = "guard"  # a bad step: marked on the loss curve itself, there may be many
SAYS_ITS_STEP = QUIET | {"start", "resume", "finish", GUARD, "rollback"}  # for the others the metrics say it
SLACK_SECONDS = 0.05  # between a worker's clock reading and the event's
LOST = ("redone", "save_stall", "detection", "restart", "idle")


@dataclass
class Event:
    """One event, with the worker seconds it cost by category."""

    time: float
    kind: str
    detail: dict[str, Any]
    step: int = 0
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short words for a figure."""
        words = self.kind.replace("_", " ")
        return f"{words} → {workers(self.size)}" if self.size and self.kind != "finish" else words

    @property
    def size(self) -> int:
        """Workers after the event, 0 when it does not say."""
        size = self.detail.get("to", self.detail.get("world_size", self.detail.get("size")))
        return size if isinstance(size, int) else 0


def read_events(records: Sequence[dict], metrics: Sequence[dict], ledger: Sequence[dict]) -> list[Event]:
    """Events in order of time, each with the step the run was at and what it cost."""
    events = [Event(float(record.get("time", 0)), str(record.get("kind", "")), dict(record.get("detail") or {}))
              for record in sorted(records, key=lambda record: record.get("time", 0))]
    reached = sorted((float(line["time"]), int(line["step"])) for line in metrics if "loss" in line and "time" in line)
    at, step = 0, 0
    for event in events:
        while at < len(reached) and reached[at][0] <= event.time:
            step = reached[at][1]
            at += 1
        given = event.detail.get("step") if event.kind in SAYS_ITS_STEP else None
        event.step = int(given) if isinstance(given, int) else step
    _share_cost(events, ledger)
    return events


def marks(events: Sequence[Event]) -> list[Mark]:
    """The events a figure shows: no saves; what follows from an event at the same step is named with it."""
    lost = [event.time for event in events if event.kind == "node_lost"]
    shown: list[Mark] = []
    for event in events:
        if event.kind in QUIET or event.kind in ("driver_start", "resize_asked", GUARD):
            continue
        if event.kind == "failure" and any(abs(event.time - at) < SAME_FAILURE_SECONDS for at in lost):
            continue
        last = shown[-1] if shown else None
        if last and event.kind in CONSEQUENCES and event.step == last.step and last.kind != "start":
            name = last.label.partition(" → ")[0]
            shown[-1] = Mark(last.time, last.step, last.kind, f"{name} → {workers(event.size)}") if event.size else last
        elif last and event.kind == last.kind and event.step == last.step:  # one refused after another
            times = int(last.label.rpartition(" ×")[2]) + 1 if " ×" in last.label else 2
            shown[-1] = Mark(last.time, last.step, last.kind, f"{event.label} ×{times}")
        else:
            shown.append(Mark(event.time, event.step, event.kind, event.label))
    return shown


def bad_steps(events: Sequence[Event]) -> list[Mark]:
    """What the guards noticed, as marks on the loss curve."""
    return [Mark(event.time, event.step, GUARD, f"{event.detail.get('reason', 'bad step')} at step {event.step}: "
                 f"{event.detail.get('action', '')}") for event in events if event.kind == GUARD]


def checkpoints(events: Sequence[Event]) -> list[Event]:
    """One event for each checkpoint: when it was published, or handed over where nothing says that it was."""
    return ([event for event in events if event.kind == "commit"]
            or [event for event in events if event.kind == "save"])


def workers(number: int) -> str:
    """1 worker, 2 workers."""
    return f"{number} worker" + ("s" if number != 1 else "")


def _share_cost(events: Sequence[Event], ledger: Sequence[dict]) -> None:
    """Lost time goes to the cause before it, the time of a save to the nearest save."""
    causes, saves = _causes(events), [event for event in events if event.kind == "save"]
    for part in ledger:
        category, start, end = str(part.get("category")), float(part["start"]), float(part["end"])
        if category not in LOST:
            continue
        if category == "save_stall" and saves:
            culprit = min(saves, key=lambda event: abs(event.time - end))
        else:
            culprits = [event for event in causes if event.time <= end + SLACK_SECONDS]
            if category == "detection":  # a failure is noticed when this time is over, not before
                culprits = [event for event in causes if event.time >= start][:1] or culprits
            if not culprits:
                continue
            culprit = culprits[-1]
        culprit.cost[category] = culprit.cost.get(category, 0.0) + end - start


def _causes(events: Sequence[Event]) -> list[Event]:
    """Events that lost time is counted to. Until trainers run again only a first failure can follow another cause."""
    found: list[Event] = []
    waiting = ""  # kind of the cause whose trainers do not run yet
    for event in events:
        first_failure = event.kind in FAILURES and waiting not in FAILURES
        if event.kind in CAUSES | CONSEQUENCES and (not waiting or first_failure):
            found.append(event)
            waiting = event.kind
        if event.kind in ("start", "resume"):
            waiting = ""
    return found
