"""The events of a run and their cost, from events.jsonl and ledger.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.report.training_plots import Mark

# Events that stop and start workers. The others follow from one of these, if one came before.
FAILURES = frozenset({"node_lost", "failure"})
CAUSES = FAILURES | {"driver_start", "node_draining", "node_joined"}
CONSEQUENCES = frozenset({"start", "resize", "resume"})
QUIET = frozenset({"save", "commit"})  # there are many, so they have a row of their own in the clock figure
SAME_FAILURE_SECONDS = 30.0  # a lost node and the failure of its workers are noticed separately
GUARD = "guard"  # a bad step; marked on the loss curve, since there may be many
# the metrics say the step of the others
SAYS_ITS_STEP = QUIET | {"start", "resume", "finish", GUARD, "rollback", "corruption"}
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
        """A short label for a figure."""
        words = self.kind.replace("_", " ")
        return f"{words} → {workers(self.size)}" if self.size and self.kind != "finish" else words

    @property
    def size(self) -> int:
        """Number of workers after the event; 0 if it does not say."""
        size = self.detail.get("to", self.detail.get("world_size", self.detail.get("size")))
        return size if isinstance(size, int) else 0


def read_events(records: Sequence[dict], metrics: Sequence[dict], ledger: Sequence[dict]) -> list[Event]:
    """Return the events in order of time, each with the run's step and its cost.

    Args:
        records: lines of events.jsonl.
        metrics: lines of metrics.jsonl.
        ledger: records of the time ledger.
    """
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
    """Return the events that a figure shows, without saves. A consequence at the same step is merged into its cause."""
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
    """Return the steps that guards noticed, as marks on the loss curve."""
    return [Mark(event.time, event.step, GUARD, f"{event.detail.get('reason', 'bad step')} at step {event.step}: "
                 f"{event.detail.get('action', '')}") for event in events if event.kind == GUARD]


def checkpoints(events: Sequence[Event]) -> list[Event]:
    """Return one event per checkpoint: its commit, or its save if no commit is recorded."""
    return ([event for event in events if event.kind == "commit"]
            or [event for event in events if event.kind == "save"])


def workers(number: int) -> str:
    """Format a number of workers: 1 worker, 2 workers."""
    return f"{number} worker" + ("s" if number != 1 else "")


def _share_cost(events: Sequence[Event], ledger: Sequence[dict]) -> None:
    """Assign lost time to the cause before it, and the time of a save to the nearest save."""
    causes = _causes(events)
    saves = [event for event in events if event.kind == "save"]
    for part in ledger:
        category, start, end = str(part.get("category")), float(part["start"]), float(part["end"])
        if category not in LOST:
            continue
        if category == "save_stall" and saves:
            culprit = min(saves, key=lambda event: abs(event.time - end))
        else:
            culprits = [event for event in causes if event.time <= end + SLACK_SECONDS]
            if category == "detection":  # the failure is noticed at the end of this time
                culprits = [event for event in causes if event.time >= start][:1] or culprits
            if not culprits:
                continue
            culprit = culprits[-1]
        culprit.cost[category] = culprit.cost.get(category, 0.0) + end - start


def _causes(events: Sequence[Event]) -> list[Event]:
    """Return the events that lost time is assigned to.

    Until workers train again, only a first failure can follow another cause.
    """
    causes: list[Event] = []
    waiting = ""  # kind of the cause after which no worker trains yet
    for event in events:
        if event.kind == "rollback":  # the same workers go back; none starts or resumes
            causes.append(event)
            continue
        first_failure = event.kind in FAILURES and waiting not in FAILURES
        if event.kind in CAUSES | CONSEQUENCES and (not waiting or first_failure):
            causes.append(event)
            waiting = event.kind
        if event.kind in ("start", "resume"):
            waiting = ""
    return causes
