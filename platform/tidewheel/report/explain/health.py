"""Whether a run is healthy now, from its commit log, events and metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidewheel.commit_record import Record
from tidewheel.report.events import Event
from tidewheel.report.page import seconds as duration

LEAST_SILENCE = 60.0
"""Seconds without a step that are never unusual."""
STEPS_OF_SILENCE = 20
"""A run without a step for this many usual ones stands still."""
LEASES = 3
"""A driver without a heartbeat for this many leases has ended: clocks of two machines may differ a little."""
RECENT_STEPS = 200


class State(StrEnum):
    """What a run does now."""

    FINISHED = "finished"
    TRAINING = "training"
    RECOVERING = "recovering"
    STALLED = "stands still"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "its driver is gone"
    UNKNOWN = "unknown"


HEALTHY = frozenset({State.FINISHED, State.TRAINING, State.STOPPED})


@dataclass(frozen=True)
class Health:
    """The state of a run, and what to say about it."""

    state: State
    text: str
    problems: tuple[str, ...] = ()
    """What needs a person's attention although the run trains."""

    @property
    def healthy(self) -> bool:
        """Whether nothing needs attention."""
        return self.state in HEALTHY and not self.problems


@dataclass(frozen=True)
class Owner:
    """The newest record of a run's commit log, with the last heartbeat of its owner."""

    record: Record
    beat: float
    """Unix seconds; 0: none yet."""
    lease: float
    """Seconds without a heartbeat after which the run may be taken over."""


def health(result: dict[str, Any], events: Sequence[Event], metrics: Sequence[dict[str, Any]], owner: Owner | None,
           committed: int, now: float) -> Health:
    """Return the health of a run.

    Args:
        result: result.json; {} while the run is not over.
        events: of the run, in order.
        metrics: lines of metrics.jsonl, in order.
        owner: of the run; None for a run without a commit log.
        committed: step of the newest committed checkpoint; 0 without one.
        now: Unix seconds.
    """
    if result:
        return Health(State.FINISHED, f"finished at step {result.get('steps', 0):,}")
    trained = [line for line in metrics if "loss" in line and "time" in line]
    step = max((int(line["step"]) for line in trained), default=0)
    saved = f"newest checkpoint: step {committed:,}" if committed else "no checkpoint yet"
    ended = _ended(events, owner, now)
    if ended is not None:
        state, why = ended
        return Health(state, f"{why}; reached step {step:,}; {saved}; the same command goes on from there")
    if owner is None:
        return Health(State.UNKNOWN, f"reached step {step:,}; {saved}; no process has ever owned the run")
    problems = _problems(trained, committed, step)
    kinds = ("failure", "resize", "resume", "start", "driver_start")
    last = next((event for event in reversed(events) if event.kind in kinds), None)
    if last is not None and last.kind not in ("resume", "start"):
        waited = now - last.time
        state = State.RECOVERING if waited < 2 * LEAST_SILENCE else State.STALLED
        return Health(state, f"no step since the {last.kind.replace('_', ' ')} {duration(waited)} ago; {saved}",
                      problems)
    silence = now - max([float(line["time"]) for line in trained[-1:]] + ([last.time] if last else []), default=now)
    usual = _usual(trained)
    if silence > max(LEAST_SILENCE, STEPS_OF_SILENCE * usual):
        return Health(State.STALLED, f"no step for {duration(silence)}, usually one takes {duration(usual)}; {saved}",
                      problems)
    return Health(State.TRAINING, f"step {step:,}, the last one {duration(max(0.0, silence))} ago; {saved}", problems)


def _ended(events: Sequence[Event], owner: Owner | None, now: float) -> tuple[State, str] | None:
    """Return how the last driver ended; None if it seems alive."""
    kinds = ("stopped", "failure", "taken_over", "driver_start", "start", "resume")
    last = next((event for event in reversed(events) if event.kind in kinds), None)
    if owner is None:
        if last is not None and last.kind == "stopped":
            return State.STOPPED, f"stopped on request at step {last.detail.get('step', last.step)}"
        return None
    alive = not owner.record.released and not owner.record.owner.is_gone()
    if alive and now - max(owner.beat, owner.record.time) < LEASES * owner.lease:
        return None
    if last is not None and last.kind == "stopped":
        return State.STOPPED, f"stopped on request at step {last.detail.get('step', last.step)}"
    if last is not None and last.kind == "failure" and last.detail.get("restart") is False:
        first_line = str(last.detail.get("error") or "none was recorded").partition("\n")[0]
        return State.FAILED, f"ended by an error: {first_line[:200]}"
    how = "has ended" if owner.record.released else f"has given no sign of life for {duration(now - owner.beat)}" if (
        owner.beat) else "has given no sign of life"
    return State.DEAD, f"its driver, {owner.record.owner}, {how}"


def _problems(trained: Sequence[dict[str, Any]], committed: int, step: int) -> tuple[str, ...]:
    problems = []
    newest = trained[-1] if trained else {}
    failed = int(newest.get("failed_saves") or 0)
    if failed:
        problems.append(f"the last {failed} saves have failed: a failure now would cost {step - committed:,} steps")
    loss = newest.get("loss")
    if isinstance(loss, float) and not math.isfinite(loss):
        problems.append(f"the loss is {loss}")
    if newest.get("tracker_failures"):
        problems.append(f"trackers have failed {newest['tracker_failures']} times")
    return tuple(problems)


def _usual(trained: Sequence[dict[str, Any]]) -> float:
    """Return the median seconds of a step."""
    recent = [float(line["step_seconds"]) for line in trained[-RECENT_STEPS:] if line.get("step_seconds")]
    return statistics.median(recent) if recent else LEAST_SILENCE / STEPS_OF_SILENCE
