"""Who is to blame for an error, and what is left out because of it: plain decisions without sockets or clock.

Every member of a generation that ends by an error reports that error. Most only report that a collective broke; these
are echoes. The cause is the first report that is no echo (`elastic.faults` tells them apart).

| what ended the generation | whose it is | what follows |
|---|---|---|
| a process or node is lost or silent | nobody's | the others go on, however often it happens |
| echoes only (a broken network, a hang without a culprit) | everybody's | one more try, counted |
| a worker's own error, and others can go on without it | the worker's | its process is left out |
| the same kind of error on several nodes, in one generation | the run's | ends the run if fatal, else counted |
| the same kind again from another node | the run's | the same, and who raised it is left out |
| a worker's own error, and no legal size without it | the run's | the same |

Fatal are the errors that name something a person must fix (`TidewheelError`: a configuration, a damaged shard) and
mistakes in the code (`TypeError`, `ValueError` and the like). Storage that is away is fatal only before the first step.
"Again" means before the run got a step further than ever, or in the same words. Counted tries without such a step are
limited by `elastic.max_failures_without_progress`.

What is left out grows with each repetition: the process, then its device, then its node. The process is ended, and a
new one is started in its place. A device or node is left alone for a time that doubles, up to a bound. Before a worker
of a place that was blamed gets a rank again it must pass a probe (`elastic.probe`). If nothing else is left, blamed
places are used again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidewheel.elastic.policy import Backoff

REMEMBERED = 64
"""Faults that are compared with a new one."""


class Level(StrEnum):
    """What is left out."""

    PROCESS = "process"
    DEVICE = "device"
    NODE = "node"


@dataclass(frozen=True)
class Fault:
    """An error that a worker raised by itself."""

    worker: str
    node: str
    device: str
    """Its GPUs, as the node numbers them; "" on CPU."""
    kind: str
    """The error's class."""
    text: str
    fatal: bool
    """Starting again does not help against it."""
    furthest: int
    """The furthest step of the run when it came."""

    @property
    def wording(self) -> str:
        """The text without numbers: two faults of the same cause differ in addresses, steps and ranks."""
        return re.sub(r"\d+", "#", self.text)


@dataclass(frozen=True)
class Exclusion:
    """A place that is left out."""

    level: Level
    node: str
    device: str
    until: float
    """Monotonic seconds; a probe decides then."""
    seconds: float
    times: int
    """The node was blamed so often, this time included."""


@dataclass(frozen=True)
class Judgement:
    """What a fault leads to."""

    cause: Fault
    out: Exclusion | None = None
    """Who is left out; None: nobody."""
    counted: bool = False
    """It counts against the tries without progress."""
    final: bool = False
    """It is the run's, and ends it."""


Spare = Callable[[Fault, Level], bool]
"""Whether a legal number of workers remains without the fault's process, device or node."""


class Blame:
    """Remembers faults and judges new ones.

    Args:
        backoff: how long a place is left out.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._past: list[tuple[Fault, float]] = []
        self._out: dict[tuple[str, str], Exclusion] = {}

    def judge(self, faults: Sequence[Fault], spare: Spare, now: float) -> Judgement:
        """Judge the faults of one generation, in the order in which they were reported; at least one."""
        cause = faults[0]
        self._past = [(past, at) for past, at in self._past if now - at < self._memory][-REMEMBERED:]
        again = self._seen_elsewhere(cause, spare)
        strikes = [past for past, _ in self._past if past.node == cause.node]
        self._past.append((cause, now))
        alike = [fault for fault in faults if fault.kind == cause.kind]
        together = len({fault.worker for fault in alike}) > 1
        if len({fault.node for fault in alike}) > 1 or (together and not spare(cause, Level.NODE)):
            return Judgement(cause, counted=True, final=cause.fatal)
        level = _spared(Level.NODE if together else _escalated(cause, strikes), cause, spare)
        if level is None or (again and cause.fatal):
            return Judgement(cause, counted=True, final=cause.fatal)
        return Judgement(cause, self._leave_out(cause, level, len(strikes) + 1, now), counted=again)

    def refuse(self, fault: Fault, now: float) -> Exclusion:
        """Leave out a process that did not pass its probe; the next one of its place waits longer."""
        times = 1 + sum(past.node == fault.node for past, _ in self._past)
        self._past.append((fault, now))
        return self._leave_out(fault, Level.PROCESS, times, now)

    def suspects(self, node: str, device: str, now: float) -> bool:
        """Whether a worker there must pass a probe before it gets a rank."""
        blamed = any(past.node == node and past.device == device and now - at < self._memory for past, at in self._past)
        return blamed or self.is_out(node, device, now)

    def is_out(self, node: str, device: str, now: float) -> bool:
        """Whether a worker there is left alone for now."""
        places = [self._out.get((node, "")), self._out.get((node, device))]
        return any(place is not None and now < place.until for place in places)

    def nodes_out(self, now: float) -> set[str]:
        """Nodes that are left alone as a whole for now."""
        return {place.node for place in self._out.values() if place.level is Level.NODE and now < place.until}

    def lift(self) -> None:
        """Nothing else is left: let a probe decide at once."""
        self._out.clear()

    @property
    def _memory(self) -> float:
        """Seconds for which a fault is remembered."""
        return 2 * self._backoff.most

    def _seen_elsewhere(self, cause: Fault, spare: Spare) -> bool:
        """The same kind of error came from elsewhere before: since the run last made progress, or in the same words."""
        for past, _ in self._past:
            elsewhere = past.node != cause.node or (past.worker != cause.worker and not spare(cause, Level.NODE))
            same_words = cause.fatal and past.wording == cause.wording
            if past.kind == cause.kind and elsewhere and (past.furthest == cause.furthest or same_words):
                return True
        return False

    def _leave_out(self, cause: Fault, level: Level, times: int, now: float) -> Exclusion:
        seconds = self._backoff.seconds(max(times - 1, level is Level.NODE))
        device = "" if level is Level.NODE else cause.device
        out = Exclusion(level, cause.node, device, now + seconds, seconds, times)
        self._out[(out.node, out.device)] = out
        return out


def _escalated(cause: Fault, strikes: Sequence[Fault]) -> Level:
    """What to leave out, after earlier faults of the same node."""
    same_device = any(strike.device == cause.device for strike in strikes)
    if len(strikes) >= 2 or (same_device and not cause.device):
        return Level.NODE
    return Level.DEVICE if same_device else Level.PROCESS


def _spared(level: Level, cause: Fault, spare: Spare) -> Level | None:
    """The highest level, up to `level`, that the run can do without; None: it needs even the process."""
    levels = [Level.NODE, Level.DEVICE, Level.PROCESS]
    return next((each for each in levels[levels.index(level):] if spare(cause, each)), None)
