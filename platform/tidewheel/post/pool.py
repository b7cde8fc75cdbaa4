"""Pools of generators: they run jobs, and run a job again when the process that had it is gone.

A result follows from its job alone, so it does not matter which process makes it, or how often. `LocalPool` has
processes on this machine, `RayPool` actors on a cluster, which nodes may join and leave.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, Protocol

from tidewheel.errors import RolloutError
from tidewheel.placement import with_labels
from tidewheel.post.groups import Group, Job, lost
from tidewheel.post.health import ASKED_IN_STALL, Lease, Pace
from tidewheel.train.policy.config import GeneratorsConfig

logger = logging.getLogger(__name__)
START_SECONDS = 600.0
"""Processes that have returned no group yet may take this long, if a lease is shorter: they import and load first."""
OnEvent = Callable[..., None]
ERROR_CHARACTERS = 600
"""Of an error's text, its end."""
NO_NODE_SECONDS = 60.0
"""Time that actors may wait for a node before it is said."""
HEALTH = "health"
"""Group of calls that an actor answers while it makes a group."""


class Pool(Protocol):
    """Runs jobs."""

    def submit(self, job: Job) -> None:
        """Take a job. It returns at once."""
        ...

    def next(self, seconds: float) -> Group | None:
        """Return a group that is done, in any order; None if none is after `seconds`.

        Raises:
            Exception: an error of the generator that another process would meet too.
        """
        ...

    def close(self) -> None:
        """End the processes."""
        ...


_arguments: tuple[Any, ...] = ()
"""Of a process of `LocalPool`."""


def _begin(arguments: tuple[Any, ...]) -> None:
    global _arguments
    _arguments = arguments


@functools.cache
def _generator() -> Any:
    from tidewheel.post.generator import Generator

    return Generator(*_arguments)


def _make(job: Job) -> Group:
    return _generator().make(job)  # an error of its start is the job's, where it is told


class LocalPool:
    """Processes on this machine.

    Args:
        arguments: of `Generator`.
        settings: number of processes, and tries.
        on_event: told of lost processes: `on_event(kind, **detail)`.
    """

    def __init__(self, arguments: tuple[Any, ...], settings: GeneratorsConfig, on_event: OnEvent) -> None:
        self._arguments, self._settings, self._on_event = arguments, settings, on_event
        self._executor = self._started()
        self._jobs: dict[Future[Group], tuple[Job, int]] = {}
        self._given_up: deque[Group] = deque()
        self._since = time.monotonic()  # the last result, or the last job after a time without any

    def _started(self) -> ProcessPoolExecutor:
        self._has_started = False  # until the first result
        return ProcessPoolExecutor(self._settings.processes, multiprocessing.get_context("spawn"), _begin,
                                   (self._arguments,))

    def submit(self, job: Job) -> None:
        """See `Pool`."""
        if not self._jobs:
            self._since = time.monotonic()
        self._submit(job, 1)

    def _submit(self, job: Job, tries: int) -> None:
        try:
            future = self._executor.submit(_make, job)
        except BrokenProcessPool:  # found before its jobs told so
            self._restart()
            future = self._executor.submit(_make, job)
        self._jobs[future] = (job, tries)

    def next(self, seconds: float) -> Group | None:
        """See `Pool`."""
        if self._given_up:
            return self._given_up.popleft()
        done, _ = wait(self._jobs, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in done:
            if isinstance(future.exception(), BrokenProcessPool):
                self._restart()
                return self._given_up.popleft() if self._given_up else None
            del self._jobs[future]
            self._since = time.monotonic()
            self._has_started = True
            return future.result()
        lease = self._settings.lease_seconds
        limit = lease if self._has_started else max(lease, START_SECONDS)
        if self._jobs and time.monotonic() - self._since > limit:
            self._kill()  # they hang; the pool then breaks, and starts anew
        return None

    def _restart(self) -> None:
        """Start new processes in the place of a broken pool's, and give them its jobs."""
        before, self._jobs = self._jobs, {}
        self._since = time.monotonic()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._started()
        self._on_event("generator_lost", jobs=len(before))
        for future, (job, tries) in before.items():
            finished = future.done() and not future.cancelled() and future.exception() is None
            if finished:
                self._given_up.append(future.result())
            elif tries >= self._settings.most_tries:
                self._given_up.append(lost(job, tries))
            else:
                self._submit(replace(job, again=True), tries + 1)

    def close(self) -> None:
        """See `Pool`."""
        processes = self._processes()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._kill(processes)

    def _processes(self) -> list[Any]:
        return list((self._executor._processes or {}).values())

    def _kill(self, processes: list[Any] | None = None) -> None:
        for process in self._processes() if processes is None else processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class RayPool:
    """Actors on a cluster, each with a lease for one job at a time.

    An actor that makes no progress is ended (`post.health`). When actors are idle, the first slow group in the order of
    the prompts is given to one of them too, and counts when one of the two has it: both make the same.

    Args:
        arguments: of `Generator`.
        settings: number of actors, resources, leases and tries.
        on_event: told of lost actors: `on_event(kind, **detail)`.
    """

    def __init__(self, arguments: tuple[Any, ...], settings: GeneratorsConfig, on_event: OnEvent) -> None:
        import ray

        from tidewheel.post.generator import Generator

        self._arguments, self._settings, self._on_event = arguments, settings, on_event
        options: dict[str, Any] = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": 0,
                                   "concurrency_groups": {HEALTH: 1}}
        if settings.placement.selector:
            options["label_selector"] = settings.placement.selector
        self._actor_class: Any = ray.remote(**options)(Generator)
        self._waiting: deque[tuple[Job, int]] = deque()
        self._starting: dict[Any, Any] = {}  # the object that tells that an actor is ready, and the actor
        self._idle: list[Any] = []
        self._leases: dict[Any, Lease] = {}  # by the object that will be the group
        self._pace = Pace()
        self._given_up: deque[Group] = deque()
        self._size = settings.processes
        self._without_any: float | None = None  # since when no actor runs, until it was said
        self._said = False

    def submit(self, job: Job) -> None:
        """See `Pool`."""
        self._waiting.append((job, 1))

    def next(self, seconds: float) -> Group | None:
        """See `Pool`."""
        import ray

        self._fill()
        self._lease()
        self._tell_of_missing_nodes()
        if self._given_up:
            return self._given_up.popleft()
        pending = [*self._starting, *self._leases]
        done, _ = ray.wait(pending, num_returns=1, timeout=seconds)
        self._check_health()
        for reference in done:
            if reference in self._starting:
                self._started(reference)
            elif reference in self._leases:
                return self._returned(reference)
        return None

    def resize(self, processes: int) -> None:
        """Have this many actors: others start, or those without a job end as soon as there are any.

        Args:
            processes: number of actors.
        """
        self._size = processes

    def _fill(self) -> None:
        """Ask for actors until there are enough, or end some; those that find no room wait for a node."""
        import ray

        device = "cuda" if self._settings.gpus else "cpu"
        count = len(self._starting) + len(self._idle) + len(self._leases)
        while count > self._size and (self._starting or self._idle):
            ray.kill(self._starting.popitem()[1] if self._starting else self._idle.pop())
            count -= 1
        while len(self._starting) + len(self._idle) + len(self._leases) < self._size:
            actor = self._actor_class.remote(*self._arguments, device)
            self._starting[actor.__ray_ready__.remote()] = actor

    def _tell_of_missing_nodes(self) -> None:
        """Say once when no actor has found a node for a while: the placement may name none."""
        if self._idle or self._leases or not self._starting:
            self._without_any = None
            return
        now = time.monotonic()
        self._without_any = now if self._without_any is None else self._without_any
        if now - self._without_any > NO_NODE_SECONDS and not self._said:
            self._said = True
            where = with_labels(self._settings.placement.selector)
            logger.warning("no node%s has room for a generator of %g CPUs and %g GPUs: rollouts wait for one", where,
                           self._settings.cpus, self._settings.gpus)
            self._on_event("generators_wait", generators=len(self._starting), node=where.strip())

    def _lease(self) -> None:
        while self._waiting and self._idle:
            self._give(*self._waiting.popleft())
        if self._idle and (slow := self._pace.slow(self._leases.values(), time.monotonic())) is not None:
            self._on_event("group_begun_again", position=slow.job.position, prompt=slow.job.prompt.id,
                           seconds=round(time.monotonic() - slow.since, 3))
            self._give(replace(slow.job, again=True), slow.tries)

    def _give(self, job: Job, tries: int) -> None:
        actor = self._idle.pop()
        self._leases[actor.make.remote(job)] = Lease(actor, job, tries, time.monotonic())

    def _started(self, reference: Any) -> None:
        import ray

        actor = self._starting.pop(reference)
        try:
            ray.get(reference)
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:  # so would the next
                raise RolloutError(f"a generator cannot start: {str(error)[-ERROR_CHARACTERS:]}",
                                   where="rollouts.generators", fix="mend what the last lines name; a reward of your "
                                   "own must be importable on every node") from error
            self._on_event("generator_lost", jobs=0)
            return
        self._idle.append(actor)

    def _returned(self, reference: Any) -> Group | None:
        import ray

        lease = self._leases.pop(reference)
        try:
            group: Group = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except ray.exceptions.RayError:  # the actor or its node is gone
            self._again(lease)
            return None
        self._idle.append(lease.actor)
        if lease.is_late:
            return None
        self._pace.took(time.monotonic() - lease.since)
        for other in self._leases.values():
            other.is_late |= other.group == lease.group
        return group

    def _again(self, lease: Lease, **why: Any) -> None:
        """Have the job of a lost actor done again, unless another one has done it or does it."""
        job, tries = lease.job, lease.tries
        self._on_event("generator_lost", jobs=int(not lease.is_late), position=job.position, prompt=job.prompt.id,
                       **why)
        others = [other for other in self._leases.values() if other.group == lease.group]
        for other in others:
            other.tries = max(other.tries, tries + 1)
        if lease.is_late or others:
            return
        if tries >= self._settings.most_tries:
            self._given_up.append(lost(job, tries))
        else:
            self._waiting.appendleft((replace(job, again=True), tries + 1))

    def _check_health(self) -> None:
        """End actors that make no progress, or whose lease is over: they hang, or their node is gone without a sign."""
        import ray

        now, settings = time.monotonic(), self._settings
        asked = {lease.asked: lease for lease in self._leases.values() if lease.asked is not None}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=0) if asked else ([], [])
        for call in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # it is gone, as its job says
                asked[call].heard(ray.get(call), now)
        for reference, lease in list(self._leases.items()):
            if why := lease.overdue(now, lease_seconds=settings.lease_seconds, stall_seconds=settings.stall_seconds):
                del self._leases[reference]
                ray.kill(lease.actor)
                self._again(lease, why=why)
            elif lease.asked is None and now - lease.asked_at > settings.stall_seconds / ASKED_IN_STALL:
                lease.asked, lease.asked_at = lease.actor.beat.options(concurrency_group=HEALTH).remote(), now

    def close(self) -> None:
        """See `Pool`."""
        import ray

        for actor in (*self._starting.values(), *self._idle, *(lease.actor for lease in self._leases.values())):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
