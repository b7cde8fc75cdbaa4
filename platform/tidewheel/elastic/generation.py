"""What a generation is made of: its workers, its limits, how they leave it, and which of them take a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tidewheel.elastic.blame import Fault


class Phase(StrEnum):
    """Workers gather; a generation runs; its members are told to leave; the run failed, was stopped early, or is
    over."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    FAILED = "failed"
    STOPPED = "stopped"
    OVER = "over"


class ExitReason(StrEnum):
    """How a worker left its generation."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"
    """By an error that another try may not meet again."""
    FATAL = "fatal"
    """By an error that starting again does not fix."""


class Outbox(Protocol):
    """Where decisions go."""

    def send(self, worker: str, message: dict[str, Any]) -> None:
        """Tell a worker."""

    def fence(self, worker: str) -> None:
        """Cut a worker off: its process ends itself when it notices, and Ray is asked to end it."""

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event; `at` is monotonic."""

    def formed(self, generation: int, size: int) -> None:
        """A generation begins."""


LEAVE_TIMES = 6
"""A member that has heard that it must leave, gives signs of life and is at work has this many times `Limits.leave`: on
a busy machine even what needs no storage takes its time."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    heartbeat: float = 3.0
    """A worker without a sign of life for this long, in a generation that does not get on, is lost."""
    leave: float = 5.0
    """Members that were told to leave have this long, and longer as long as they are at work: see `LEAVE_TIMES`."""
    start: float = 60.0
    """The first generation of a group of workers waits this long for those that are still starting."""
    gather: float = 120.0
    """So long there may be too few workers; then Ray Train is asked to start anew."""


@dataclass
class Worker:
    """One worker as it is known here."""

    name: str
    node: str = ""
    connected: bool = False
    spot: bool = False
    """Its node may be taken away at any time."""
    leaving: bool = False
    """Its node is being drained, or it was asked to end."""
    beat: float = 0.0
    work: float = 0.0
    """CPU seconds that its training thread has used."""
    worked_at: float = float("-inf")
    """When that was last seen to grow."""
    aborts: int = -1
    """The newest generation whose end it has heard of."""
    left: ExitReason | None = None
    """How it left the generation it is a member of."""
    text: str = ""
    device: str = ""
    """Its GPUs, as the node numbers them; "" on CPU."""
    cleared: bool = True
    """It may have a rank; False: its place was blamed, and it has not passed a probe since."""
    probed_at: float | None = None
    """When it was asked to probe itself; None: it is not asked now."""

    @property
    def available(self) -> bool:
        """Whether it can take a rank and keep it."""
        return self.connected and self.cleared and not self.leaving


@dataclass
class Generation:
    """One group of ranks."""

    number: int
    members: tuple[str, ...]
    """Names in rank order."""
    began: float
    step: int = 0
    """Steps done when last heard of; 0: none in this generation."""
    stepped_at: float = 0.0
    ended_at: float | None = None
    """When the first sign of its end was seen."""
    lost: dict[str, str] = field(default_factory=dict)
    """Members that are gone, and why."""
    faults: list[Fault] = field(default_factory=list)
    """Errors that members raised by themselves, as they were reported."""
    loss_came_first: bool = False
    """A member was lost before any of `faults` was reported."""
    planned: str = ""
    """Reason of the change it was asked to make way for."""


def chosen(there: Sequence[Worker], size: int, before: Sequence[str]) -> list[Worker]:
    """`size` of those that are there, in rank order: those of the generation before first, in their order, but those
    of a node together, as neighbouring ranks talk most, and nodes that stay before spot nodes: rank 0, which writes
    the run's records, is on one of them whenever there is one."""
    known = {name: index for index, name in enumerate(before)}
    ranked = sorted(there, key=lambda worker: (known.get(worker.name, len(known)), worker.spot))
    chosen, others = ranked[:size], ranked[size:]
    if all(worker.spot for worker in chosen):
        chosen[-1:] = [worker for worker in others if not worker.spot][:1] or chosen[-1:]
    groups: dict[str, list[Worker]] = {}
    for worker in chosen:
        groups.setdefault(worker.node, []).append(worker)
    return [worker for group in sorted(groups.values(), key=lambda group: group[0].spot) for worker in group]
