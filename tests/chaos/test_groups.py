"""Two groups of a DiLoCo run on a cluster each: three events each change no bit, and a record explains who was late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.groups import run

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(7200)]
KINDS = ["kill_worker", "kill_group", "drain"]


@pytest.mark.parametrize("patience", [0.0, 3.0], ids=["all groups in every round", "late groups left out"])
def test_disturbed_groups_have_the_result_that_the_rounds_say(tmp_path: Path, patience: float):
    """The steps take half a second until the last event, so that no event comes after the end on any machine."""
    outcome = run(tmp_path, seconds=600, seed=1, kinds=KINDS, gap=(4, 8), steps=150, step_seconds=0.5, count=len(KINDS),
                  reproducible=True, patience=patience, more=("outer.quantise=int4", "outer.error_feedback=true"))
    assert not outcome.problems, "\n".join(outcome.problems)
    for group in outcome.groups:
        assert {event.kind for event in group.happened} == set(KINDS)
    assert outcome.rounds
    assert (outcome.complete == outcome.rounds) == (patience == 0)


def test_groups_of_one_process_have_the_result_that_the_rounds_say(tmp_path: Path):
    """The same without a cluster: both groups die with their only process, one of them right after a decision."""
    outcome = run(tmp_path, seconds=600, seed=5, kinds=["kill_group", "kill_driver_around_a_round"], gap=(1, 3),
                  steps=80, step_seconds=0.3, count=2, reproducible=True, patience=3, local=True)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert [len(group.happened) for group in outcome.groups] == [2, 2]
