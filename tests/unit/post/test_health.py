"""Tests of what tells a generator that hangs from one that works, and which groups are begun again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.post.runs import InlinePool, rollout_run
from tests.unit.post.stand_in_ray import Actor, Seconds, StandInRay
from tidewheel.elastic import trainer
from tidewheel.inference.passes import Beat, PassCounter
from tidewheel.post.groups import LOST, Group, Job
from tidewheel.post.health import Lease, Pace
from tidewheel.post.policy import Version
from tidewheel.post.pool import RayPool
from tidewheel.post.prompts import Prompt
from tidewheel.train.policy.config import GeneratorsConfig

LIMITS = {"lease_seconds": 100.0, "stall_seconds": 10.0}


def lease(position: int = 0, since: float = 0.0) -> Lease:
    return Lease(None, Job(position, Prompt("p", "a", None, (1,)), Version(0, ())), 1, since)


def test_an_answer_is_progress_only_outside_of_a_pass_and_a_new_pass_always():
    held = lease()
    held.heard(Beat(5, True), 8.0)
    assert held.overdue(17.0, **LIMITS) == "", "a new pass"
    held.heard(Beat(5, True), 17.0)
    assert held.overdue(18.5, **LIMITS) == "no progress for 10.5 s", "the same pass"
    held.heard(Beat(5, False), 19.0)
    assert held.overdue(28.0, **LIMITS) == "", "it judges"
    assert held.overdue(29.5, **LIMITS), "no answer"
    for now in range(30, 101):
        held.heard(Beat(5, False), now)
    assert held.overdue(101.0, **LIMITS) == "its lease of 100 s is over"


def test_the_first_slow_group_that_one_generator_has_is_begun_again():
    pace = Pace()
    leases = [lease(7), lease(3), lease(5, since=9.0)]
    assert pace.slow(leases, 10.0) is None, "it is not known what is usual"
    for seconds in (1.0, 2.0, 30.0):
        pace.took(seconds)
    assert pace.slow(leases, 4.0) is None, "twice the median is not over"
    slow = pace.slow(leases, 10.0)
    assert slow is not None
    assert slow.job.position == 3
    leases.append(lease(3, since=10.0))
    slow = pace.slow(leases, 20.0)
    assert slow is not None
    assert slow.job.position == 5, "two have the group at 3"
    leases[2].is_late = leases[0].is_late = True
    assert pace.slow(leases, 20.0) is None, "the others are done"


def test_passes_are_counted_also_those_that_fail():
    class Model(torch.nn.Module):
        def forward(self, fails: bool) -> None:
            seen.append(counter.beat)
            if fails:
                raise ValueError("out of memory")

    seen: list[Beat] = []
    model = Model()
    counter = PassCounter(model)
    model(False)
    with pytest.raises(ValueError, match="out of memory"):
        model(True)
    assert seen == [Beat(1, True), Beat(2, True)]
    assert counter.beat == Beat(2, False)


class Watched:
    """A pool of actors of a stand-in for Ray, and what it reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int, seconds: Seconds) -> None:
        self.ray = StandInRay(monkeypatch, seconds)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pool = RayPool((), GeneratorsConfig(processes=processes, stall_seconds=4, most_tries=2),
                            lambda kind, **detail: self.events.append((kind, detail)))

    def groups(self, *positions: int) -> list[Group]:
        """Return the groups of new jobs, in the order in which they are done."""
        for position in positions:
            self.pool.submit(lease(position).job)
        done: list[Group] = []
        while len(done) < len(positions):
            if (group := self.pool.next(0.2)) is not None:
                done.append(group)
        return done

    def kinds(self) -> list[str]:
        """Return the kinds of the events."""
        return [kind for kind, _ in self.events]


def test_a_stopped_generator_is_found_and_its_group_made_by_its_successor(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch, 1, lambda actor, job: 1.0)
    watched.groups(0, 1)
    watched.ray.actors[0].stopped_at = watched.ray.now + 0.5
    began = watched.ray.now
    assert [group.failure for group in watched.groups(2)] == [""]
    assert 5 < watched.ray.now - began < 7, "found after 4 s without an answer, and made in one"
    assert watched.kinds() == ["generator_lost"]
    assert watched.events[0][1]["why"].startswith("no progress for 4.")


def test_a_generator_that_answers_but_does_not_end_its_pass_is_found(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch, 1, lambda actor, job: 3600.0 if actor.hangs else 30.0)
    watched.groups(0)
    assert watched.kinds() == [], "a long group whose passes go on"
    watched.ray.actors[0].hangs = True
    watched.groups(1)
    assert watched.kinds() == ["generator_lost"]


def test_an_idle_generator_makes_a_slow_group_and_the_first_one_counts(monkeypatch: pytest.MonkeyPatch):
    watched = Watched(monkeypatch, 2, lambda actor, job: 60.0 if job.position == 5 and actor.number == slow else 1.0)
    slow = -1
    watched.groups(0, 1, 2, 3)
    slow = watched.pool._idle[-1].number  # takes the next job
    began = watched.ray.now
    assert [group.position for group in watched.groups(5)] == [5]
    assert 3 < watched.ray.now - began < 5, "twice the usual second, and another"
    assert watched.kinds() == ["group_begun_again"]
    assert [actor.made.count(5) for actor in watched.ray.actors] == [1, 1]
    assert sorted(group.position for group in watched.groups(6, 7, 8)) == [6, 7, 8]
    while watched.ray.now < began + 70:
        assert watched.pool.next(1.0) is None, "the late group counts no second time"
    assert len(watched.pool._idle) == 2


def test_a_group_that_stops_each_generator_is_given_up(monkeypatch: pytest.MonkeyPatch):
    def seconds(actor: Actor, job: Job) -> float:
        if job.position == 5:
            actor.stopped_at = watched.ray.now
        return 1.0

    watched = Watched(monkeypatch, 2, seconds)
    watched.groups(0, 1, 2)
    [group] = watched.groups(5)
    assert group.failure == LOST
    assert [position for actor in watched.ray.actors for position in actor.made].count(5) == 2
    assert watched.groups(6)[0].failure == ""


def test_a_generator_counts_the_passes_of_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    beats: list[Beat] = []
    groups: list[Group] = []

    class Counting(InlinePool):
        def next(self, seconds: float) -> Group | None:
            groups.append(super().next(seconds))
            beats.append(self._generator.beat())
            return groups[-1]

    monkeypatch.setattr(trainer, "_local_pool", lambda arguments, *_: Counting(arguments))
    trainer.fit_local(rollout_run(tmp_path, "run", "steps=1"))
    assert not any(beat.computes for beat in beats)
    passes = [after.passes - before.passes for before, after in itertools.pairwise([Beat(0, False), *beats])]
    longest = [max(len(answer.tokens) for answer in group.answers) for group in groups]
    assert passes == longest, "one for the prompt, and one for each token but the last"
