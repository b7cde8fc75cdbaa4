"""Decide which worker caused a failure and what the run leaves out because of it, without sockets or clock.

When a generation ends in an error, every member reports one. Most reports only say that a collective broke; they are
echoes. The cause is the first report that is not an echo (`elastic.faults` tells them apart).

| what ended the generation | who caused it | what follows |
|---|---|---|
| a process or node is lost or silent | no worker | the others continue, however often it happens |
| echoes only (a broken network, a hang without a culprit) | all workers | one more attempt, counted |
| a worker's own error, and the others can continue without it | the worker | its process is left out |
| workers found that one of them computed other bits | that worker | its node is left out |
| the same kind of error on several nodes, in one generation | the run | it ends if the error is fatal, else counted |
| the same kind again from another node | the run | the same, and the worker that raised it is left out |
| a worker's own error, and no legal size without it | the run | the same |

An error is fatal if it names something that a person must fix (`TidewheelError`: a configuration, a damaged shard) or
is a mistake in the code (`TypeError`, `ValueError` and the like). Unavailable storage is fatal only before the first
step. "Again" means before the run did a step further than ever, or with the same text. The setting
`elastic.max_failures_without_progress` limits counted attempts without such a step.

Each repetition leaves out more: the process, then its device, then its node. The process is ended and a new one is
started in its place. A device or node is excluded for a time that doubles, up to a bound. Workers of a blamed place
must pass a probe (`elastic.probe`) to get a rank again. If nothing else is left, blamed places are used again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidewheel.elastic.policy import Backoff

CORRUPTION = "SilentCorruptionError"
"""Kind of fault whose node is left out at the first time: a self-test rarely finds what computes wrongly once in a
while."""
REMEMBERED = 64
"""Number of earlier faults with which a new one is compared."""


class Level(StrEnum):
    """Size of an exclusion."""

    PROCESS = "process"
    DEVICE = "device"
    NODE = "node"


@dataclass(frozen=True)
class Fault:
    """An error that a worker raised first."""

    worker: str
    node: str
    device: str
    """Its GPUs, as the node numbers them; "" on CPU."""
    kind: str
    """Class of the error."""
    text: str
    fatal: bool
    """A restart does not fix it."""
    furthest: int
    """The furthest step of the run when the error occurred."""

    @property
    def wording(self) -> str:
        """The text without numbers. Faults of one cause differ in addresses, steps and ranks."""
        return re.sub(r"\d+", "#", self.text)


@dataclass(frozen=True)
class Exclusion:
    """A process, device or node that the run leaves out for a time."""

    level: Level
    node: str
    device: str
    until: float
    """Monotonic seconds. From then on a probe decides."""
    seconds: float
    times: int
    """How often the node was blamed, including this time."""


@dataclass(frozen=True)
class Judgement:
    """The consequences of a fault."""

    cause: Fault
    out: Exclusion | None = None
    """The process, device or node to leave out; None for none."""
    counted: bool = False
    """The failure counts against the attempts without progress."""
    final: bool = False
    """The run caused it and ends."""


Spare = Callable[[Fault, Level], bool]
"""Returns whether a legal number of workers remains without the fault's process, device or node."""


class Blame:
    """Remembers faults and judges new ones.

    Args:
        backoff: duration of exclusions.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._earlier: list[tuple[Fault, float]] = []
        self._out: dict[tuple[str, str], Exclusion] = {}

    def judge(self, faults: Sequence[Fault], spare: Spare, now: float) -> Judgement:
        """Return what follows from the faults of one generation.

        Args:
            faults: at least one fault, in the order of the reports.
            spare: whether the run can do without a fault's process, device or node.
            now: monotonic seconds.
        """
        cause = faults[0]
        self._earlier = [(fault, at) for fault, at in self._earlier if now - at < self._memory][-REMEMBERED:]
        again = self._seen_elsewhere(cause, spare)
        strikes = [fault for fault, _ in self._earlier if fault.node == cause.node]
        self._earlier.append((cause, now))
        alike = [fault for fault in faults if fault.kind == cause.kind]
        together = len({fault.worker for fault in alike}) > 1
        if len({fault.node for fault in alike}) > 1 or (together and not spare(cause, Level.NODE)):
            return Judgement(cause, counted=True, final=cause.fatal)
        level = _spared(Level.NODE if together else _escalated(cause, strikes), cause, spare)
        if level is None or (again and cause.fatal):
            return Judgement(cause, counted=True, final=cause.fatal)
        return Judgement(cause, self._leave_out(cause, level, len(strikes) + 1, now), counted=again)

    def refuse(self, fault: Fault, now: float, level: Level = Level.PROCESS) -> Exclusion:
        """Leave out a process that did not pass its probe. The next fault of its node is excluded for longer.

        Args:
            fault: what the probe found.
            now: monotonic seconds.
            level: what to leave out.
        """
        times = 1 + sum(earlier.node == fault.node for earlier, _ in self._earlier)
        self._earlier.append((fault, now))
        return self._leave_out(fault, level, times, now)

    def suspects(self, node: str, device: str, now: float) -> bool:
        """Return whether a worker of this node and device must pass a probe before it gets a rank.

        Args:
            node: id of the node.
            device: GPUs, as the node numbers them; "" on CPU.
            now: monotonic seconds.
        """
        recent = [fault for fault, at in self._earlier if now - at < self._memory]
        blamed = any(fault.node == node and fault.device == device for fault in recent)
        return blamed or self.is_out(node, device, now)

    def is_out(self, node: str, device: str, now: float) -> bool:
        """Return whether workers of this node and device are excluded now.

        Args:
            node: id of the node.
            device: GPUs, as the node numbers them; "" on CPU.
            now: monotonic seconds.
        """
        exclusions = [self._out.get((node, "")), self._out.get((node, device))]
        return any(exclusion is not None and now < exclusion.until for exclusion in exclusions)

    def nodes_out(self, now: float) -> set[str]:
        """Return the nodes that are excluded as a whole now."""
        exclusions = self._out.values()
        return {out.node for out in exclusions if out.level is Level.NODE and now < out.until}

    def lift(self) -> None:
        """End all exclusions because too few other workers are left: let probes decide at once."""
        self._out.clear()

    @property
    def _memory(self) -> float:
        """Seconds for which faults are remembered."""
        return 2 * self._backoff.most

    def _seen_elsewhere(self, cause: Fault, spare: Spare) -> bool:
        """Return whether another node raised this kind of error, since the last progress or with the same text."""
        for fault, _ in self._earlier:
            elsewhere = fault.node != cause.node or (fault.worker != cause.worker and not spare(cause, Level.NODE))
            same_text = cause.fatal and fault.wording == cause.wording
            if fault.kind == cause.kind and elsewhere and (fault.furthest == cause.furthest or same_text):
                return True
        return False

    def _leave_out(self, cause: Fault, level: Level, times: int, now: float) -> Exclusion:
        seconds = self._backoff.seconds(max(times - 1, level is Level.NODE))
        device = "" if level is Level.NODE else cause.device
        out = Exclusion(level, cause.node, device, now + seconds, seconds, times)
        self._out[(out.node, out.device)] = out
        return out


def _escalated(cause: Fault, strikes: Sequence[Fault]) -> Level:
    """Return what to leave out after earlier faults of the same node."""
    if cause.kind == CORRUPTION:
        return Level.NODE
    same_device = any(strike.device == cause.device for strike in strikes)
    if len(strikes) >= 2 or (same_device and not cause.device):
        return Level.NODE
    return Level.DEVICE if same_device else Level.PROCESS


def _spared(level: Level, cause: Fault, spare: Spare) -> Level | None:
    """Return the highest level, up to `level`, that the run can do without; None if it needs even the process."""
    levels = [Level.NODE, Level.DEVICE, Level.PROCESS]
    for lower in levels[levels.index(level):]:
        if spare(cause, lower):
            return lower
    return None
