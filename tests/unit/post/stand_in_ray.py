"""A stand-in for Ray in tests of `RayPool`: actors in this process, on a clock that moves while the pool waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.post import pool
from tidewheel.post.groups import Group, Job
from tidewheel.post.health import Beat

Seconds = Callable[["Actor", Job], float]


class RayError(Exception):
    """As in Ray."""


class RayActorError(RayError):
    """As in Ray."""

    actor_init_failed = False


class RayTaskError(RayError):
    """As in Ray."""


class Reference:
    """What will be there at a time, unless its actor is stopped or dead."""

    def __init__(self, actor: Actor, at: float, value: Callable[[], Any]) -> None:
        self.actor, self.at, self.value = actor, at, value

    def is_there(self, now: float) -> bool:
        """Return whether it is there, or will never be."""
        return self.actor.dead or (now >= self.at and now < self.actor.stopped_at)


class Actor:
    """A generator. It does a pass in each tenth of a second of a job."""

    def __init__(self, ray: StandInRay, number: int) -> None:
        self._ray, self.number = ray, number
        self.dead = False
        self.stopped_at = float("inf")
        self.hangs = False
        """Whether its present pass does not end, though it answers."""
        self.made: list[int] = []
        self.__ray_ready__ = SimpleNamespace(remote=lambda: Reference(self, 0.0, lambda: None))
        self.make = SimpleNamespace(remote=self._make)
        self.beat = SimpleNamespace(options=lambda concurrency_group: SimpleNamespace(remote=self._beat))

    def _make(self, job: Job) -> Reference:
        self.made.append(job.position)
        ends = self._ray.now + self._ray.seconds(self, job)
        return Reference(self, ends, lambda: Group(job.position, job.prompt.id, job.version.number))

    def _beat(self) -> Reference:
        passes = 0 if self.hangs else int(self._ray.now * 10)
        return Reference(self, self._ray.now, lambda: Beat(passes, True))


class StandInRay:
    """The part of the module that the pool uses.

    Args:
        monkeypatch: puts it in Ray's place.
        seconds: how long an actor takes for a job.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> None:
        self.now, self.seconds = 100.0, seconds
        self.actors: list[Actor] = []
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)
        monkeypatch.setitem(sys.modules, "ray", self)
        monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: self.now))

    def remote(self, **options: Any) -> Callable[[type], Any]:
        """As in Ray; checks that the pool gives calls of health a group of their own."""
        assert options["concurrency_groups"] == {pool.HEALTH: 1}
        return lambda actor_class: SimpleNamespace(remote=self._actor)

    def _actor(self, *arguments: Any) -> Actor:
        self.actors.append(Actor(self, len(self.actors)))
        return self.actors[-1]

    def wait(self, references: Sequence[Reference], *, num_returns: int, timeout: float
             ) -> tuple[list[Reference], list[Reference]]:
        """As in Ray; waits by moving the clock."""
        until = self.now + timeout
        while True:
            there = [reference for reference in references if reference.is_there(self.now)][:num_returns]
            if there or self.now >= until:
                return there, [reference for reference in references if reference not in there]
            self.now = min(until, self.now + 0.05)

    def get(self, reference: Reference) -> Any:
        """As in Ray."""
        if reference.actor.dead:
            raise RayActorError
        return reference.value()

    def kill(self, actor: Actor) -> None:
        """As in Ray."""
        actor.dead = True
