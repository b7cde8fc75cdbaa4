"""Tests of what tells a generator that hangs from one that works, and which groups are begun again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.unit.post.runs import InlinePool, rollout_run
from tidewheel.elastic import trainer
from tidewheel.post.groups import Group, Job
from tidewheel.post.health import Beat, Lease, Pace, PassCounter
from tidewheel.post.policy import Version
from tidewheel.post.prompts import Prompt

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


def test_a_generator_counts_the_passes_of_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    beats: list[Beat] = []
    groups: list[Group] = []

    class Watched(InlinePool):
        def next(self, seconds: float) -> Group | None:
            groups.append(super().next(seconds))
            beats.append(self._generator.beat())
            return groups[-1]

    monkeypatch.setattr(trainer, "_local_pool", lambda arguments, *_: Watched(arguments))
    trainer.fit_local(rollout_run(tmp_path, "run", "steps=1"))
    assert not any(beat.computes for beat in beats)
    passes = [after.passes - before.passes for before, after in itertools.pairwise([Beat(0, False), *beats])]
    longest = [max(len(answer.tokens) for answer in group.answers) for group in groups]
    assert passes == longest, "one for the prompt, and one for each token but the last"
