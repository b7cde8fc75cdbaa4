"""Tests of the pool of processes: what hangs is ended, and its job given to another or given up."""

from __future__ import annotations

import time

from tidewheel.post.groups import Job
from tidewheel.post.policy import Version
from tidewheel.post.pool import LOST, LocalPool
from tidewheel.post.prompts import Prompt
from tidewheel.train.policy.config import GeneratorsConfig


def test_a_process_that_hangs_is_ended_and_its_group_given_up():
    events: list[str] = []
    settings = GeneratorsConfig(lease_seconds=0.5, most_tries=1)
    pool = LocalPool((), settings, lambda kind, **_: events.append(kind))
    job = Job(3, Prompt("p", "a", None, (1,)), Version(0, ()))
    try:
        pool._jobs[pool._executor.submit(time.sleep, 3600)] = (job, 1)
        group = None
        while group is None:
            group = pool.next(0.1)
    finally:
        pool.close()
    assert (group.position, group.failure) == (3, LOST)
    assert events == ["generator_lost"]
