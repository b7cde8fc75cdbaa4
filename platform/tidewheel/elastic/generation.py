"""Parts of a generation: its workers and its time limits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tidewheel.elastic.blame import Fault
from tidewheel.elastic.messages import CoordinatorMessage, ExitReason
from tidewheel.train.elastic_config import ElasticConfig

LEAVE_TIMES = 6
"""A member that knows of the abort, sends beats and uses its CPU has this many times `Limits.leave`: leaving takes long
on a busy machine."""


class Phase(StrEnum):
    """State of a membership."""

    GATHERING = "gathering"
    """There are not enough workers for a generation yet."""
    RUNNING = "running"
    ENDING = "ending"
    """The members of a generation are leaving."""
    FAILED = "failed"
    STOPPED = "stopped"
    """The run was saved and ended early, as requested."""
    OVER = "over"
    """The last step is done."""


class Outbox(Protocol):
    """Receives the decisions of a membership."""

    def send(self, worker: str, message: CoordinatorMessage) -> None:
        """Send a message to a worker."""

    def send_all(self, workers: Collection[str], message: CoordinatorMessage) -> None:
        """Send a message to several workers."""

    def fence(self, worker: str) -> None:
        """Cut off a worker: its process ends itself once it notices, and Ray kills it otherwise."""

    def unheard(self, worker: str) -> float:
        """Return the seconds for which a worker that is connected has acknowledged no message; 0.0 if none waits."""

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        """Record an event of the run.

        Args:
            kind: its name.
            detail: its fields.
            at: monotonic seconds; default: now.
        """

    def form(self, generation: Generation) -> None:
        """Tell the members of a new generation to join it."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds."""

    heartbeat: float = 3.0
    """A worker that sends nothing for this long is lost, if its generation makes no progress either."""
    leave: float = 5.0
    """Time for members to leave after an abort; `LEAVE_TIMES` as long while they work on it."""
    start: float = 60.0
    """The first generation of a group of workers waits this long for workers that are still starting."""
    gather: float = 120.0
    """With too few workers for this long, Ray Train restarts its group of workers."""


def limits_of(elastic: ElasticConfig) -> Limits:
    """Return the time limits of a run with these settings."""
    return Limits(heartbeat=elastic.heartbeat_seconds, leave=elastic.leave_seconds,
                  gather=elastic.start_timeout_seconds)


@dataclass
class Worker:
    """A worker process as the coordinator knows it."""

    name: str
    node: str = ""
    connected: bool = False
    spot: bool = False
    """Its node may be taken away at any time."""
    leaving: bool = False
    """Its node is being drained, or its process was asked to end."""
    beat: float = 0.0
    """When it last sent something, in monotonic seconds, like all times here."""
    work: float = 0.0
    """CPU seconds used by its training thread."""
    worked_at: float = float("-inf")
    """When `work` last grew."""
    aborts: int = -1
    """Newest generation that it knows was aborted."""
    left: ExitReason | None = None
    """Why it left the generation that it is a member of; None while it is in it."""
    text: str = ""
    """Error with which it left."""
    device: str = ""
    """Its GPUs, as the node numbers them; "" on CPU."""
    cleared: bool = True
    """It may have a rank. False when its process, device or node was blamed, until it passes a probe."""
    probed_at: float | None = None
    """When it was asked to probe itself; None if no answer is due."""

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
    """Last step known to be done; 0 before the first step of this generation."""
    stepped_at: float = 0.0
    ended_at: float | None = None
    """When the first sign of its end was seen."""
    lost: dict[str, str] = field(default_factory=dict)
    """Members that are gone, and why."""
    faults: list[Fault] = field(default_factory=list)
    """Errors that members raised first, in the order of their reports."""
    loss_came_first: bool = False
    """A member was lost before the first of `faults` was reported."""
    planned: str = ""
    """Reason of a planned change for which the members were asked to leave; "" without one."""
    aborted: bool = False
    """The members were told to leave at once. They are told once, however many of them are lost afterwards."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Node by member; it is known after the member is gone."""
    excused: set[str] = field(default_factory=set)
    """Nodes whose loss says nothing about them: they were about to leave, or may be taken away at any time."""
    failed: list[str] = field(default_factory=list)
    """Members that left because of an error."""
    ranks: dict[str, int] = field(init=False)
    """Rank by name."""
    remaining: dict[str, None] = field(init=False)
    """Members that are not lost and have not left, in rank order."""

    def __post_init__(self) -> None:
        self.ranks = {name: rank for rank, name in enumerate(self.members)}
        self.remaining = dict.fromkeys(self.members)
