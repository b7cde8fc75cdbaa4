"""Tests of the pool of processes: what hangs is ended, and its job given to another or given up."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from tidewheel.post.groups import LOST, Group, Job
from tidewheel.post.policy import Version
from tidewheel.post.pool import LocalPool
from tidewheel.post.prompts import Prompt
from tidewheel.train.policy.config import GeneratorsConfig


def test_a_process_that_hangs_is_ended_and_its_group_given_up():
    events: list[str] = []
    settings = GeneratorsConfig(lease_seconds=0.5, most_tries=1)
    pool = LocalPool((), settings, lambda kind, **_: events.append(kind))
    job = Job(3, Prompt("p", "a", None, (1,)), Version(0, ()))
    try:
        pool._has_started = True
        pool._jobs[pool._executor.submit(time.sleep, 3600)] = (job, 1)
        group = None
        while group is None:
            group = pool.next(0.1)
    finally:
        pool.close()
    assert (group.position, group.failure) == (3, LOST)
    assert events == ["generator_lost"]


def test_a_lease_does_not_count_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    pool = LocalPool((), GeneratorsConfig(lease_seconds=0.05, most_tries=1), lambda kind, **_: events.append(kind))
    job = Job(3, Prompt("p", "a", None, (1,)), Version(0, ()))
    made = Group(3, "p", 0, failure="reward: raised")
    result: Future[Group] = Future()
    pool._jobs[result] = (job, 1)
    monkeypatch.setattr(pool, "_kill", lambda *_: events.append("killed"))
    assert pool.next(0.1) is None, "the process has just started"
    assert not events
    result.set_result(made)
    assert pool.next(0.1) == made
    pool._jobs[Future()] = (job, 1)
    assert pool.next(0.1) is None
    assert events == ["killed"]
    monkeypatch.undo()
    pool.close()
