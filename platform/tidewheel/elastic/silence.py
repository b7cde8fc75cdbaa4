"""Find workers that are lost: silent, deaf or not leaving, as opposed to slow or temporarily unreachable ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidewheel.elastic.connection import RECONNECT_SECONDS
from tidewheel.elastic.generation import LEAVE_TIMES, Generation, Limits, Worker
from tidewheel.elastic.messages import BEAT_SECONDS

ALL_SILENT = 10
"""While all workers are silent, each may be so for this many times the limit: more likely than not the coordinator
itself is cut off, and no worker could continue without the others."""
BEATS_A_SECOND = 8192
"""Heartbeats of all workers together, at most. One costs the coordinator's process about 10 us."""
LEAST_BEATS = 3
"""Heartbeats of a worker within `ElasticConfig.heartbeat_seconds`, at least."""
LATE_SECONDS = 1.0
"""A gap longer than this between two calls, or between two messages of any workers, is the coordinator's own."""


class Silence:
    """Finds silent workers. Times are monotonic seconds.

    Args:
        workers: all workers by name; the membership's own mapping.
        limit: seconds after which a worker counts as silent.
    """

    def __init__(self, workers: Mapping[str, Worker], limit: float) -> None:
        self._workers = workers
        self._limit = limit
        self._checked: float | None = None
        self._heard: float | None = None  # last message of any worker

    def heard(self, now: float) -> None:
        """Note a message of any worker. Time in which no worker was heard does not count against the others."""
        gap = now - self._heard if self._heard is not None else 0.0
        self._heard = now
        if gap > LATE_SECONDS:
            for worker in self._workers.values():
                worker.beat = now

    def find(self, generation: Generation | None, now: float) -> list[Worker]:
        """Return the workers that are lost; call it several times a second."""
        late = now - self._checked - LATE_SECONDS if self._checked is not None else 0.0
        self._checked = now
        if late > 0:  # this process was stopped: messages wait to be read
            for worker in self._workers.values():
                worker.beat += late
        silent = [worker for worker in self._workers.values() if now - worker.beat >= self._limit and worker.connected]
        if not silent:  # nearly always; there may be thousands of workers
            return []
        newest = max(worker.beat for worker in self._workers.values() if worker.connected)
        return [worker for worker in silent if self._is_lost(worker, newest, generation, now)]

    def _is_lost(self, worker: Worker, newest: float, generation: Generation | None, now: float) -> bool:
        silent = now - worker.beat
        if newest - worker.beat < self._limit / 2 and silent < max(ALL_SILENT * self._limit, RECONNECT_SECONDS):
            return False
        if generation is None or worker.name not in generation.ranks:
            return True
        # a generation cannot progress without a member that stands still: if it does, the member is only late
        return now - max(generation.stepped_at, generation.began) >= self._limit


def find_deaf(generation: Generation, unheard: Callable[[str], float], limits: Limits, now: float) -> dict[str, float]:
    """Return the members that do not hear the coordinator while the others wait for them, and for how long.

    Args:
        generation: a generation that runs.
        unheard: returns the seconds for which a worker has acknowledged no message.
        limits: time limits.
        now: monotonic seconds.
    """
    limit = max(limits.leave, limits.heartbeat)  # heartbeats carry the acknowledgements
    if now - max(generation.stepped_at, generation.began) < limit:
        return {}
    silent = {name: unheard(name) for name in generation.remaining}
    deaf = {name: seconds for name, seconds in silent.items() if seconds >= limit}
    if len(deaf) == len(silent):  # more likely than not nobody hears the coordinator
        return {name: seconds for name, seconds in deaf.items() if seconds >= max(limit, RECONNECT_SECONDS)}
    return deaf


def find_late(generation: Generation, workers: Mapping[str, Worker], limits: Limits, now: float) -> list[str]:
    """Return the members that do not leave in time.

    Args:
        generation: a generation that ends.
        workers: all workers by name.
        limits: time limits.
        now: monotonic seconds.
    """
    assert generation.ended_at is not None
    late = []
    for name in generation.remaining:
        worker = workers[name]
        since = generation.ended_at
        if worker.aborts >= generation.number:  # it knows, and leaving takes longer on a busy machine
            since = min(max(since, worker.worked_at), since + (LEAVE_TIMES - 1) * limits.leave)
        if now - since >= limits.leave:
            late.append(name)
    return late


def beat_seconds(world_size: int, limit: float) -> float:
    """Return the time between two heartbeats: longer with many workers, but within the limit of silence.

    Args:
        world_size: number of ranks.
        limit: seconds after which a worker counts as silent.
    """
    return min(max(BEAT_SECONDS, world_size / BEATS_A_SECOND), limit / LEAST_BEATS)
