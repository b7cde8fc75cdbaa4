"""A minute of `tests.chaos.training` kills a worker and a node and drains a node; the result has the same bits.

In `make test` the first test of `tests/cluster/test_elastic.py` does the same with one event of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training import run

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.long]


def test_a_disturbed_run_has_the_result_of_an_undisturbed_one(tmp_path: Path):
    """`tests/cluster/test_elastic.py` tests the driver's death, and the command all other events."""
    kinds = ["kill_worker", "kill_node", "drain"]
    outcome = run(tmp_path, seconds=20, seed=1, nodes=3, kinds=kinds, gap=(6, 8), steps=150, reproducible=True)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert outcome.happened


FIVE = ["kill_worker", "kill_node", "freeze_node", "drain", "join"]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("task", ["qlora", "dpo"])
def test_fine_tuning_ends_with_the_same_bits_after_five_events(tmp_path: Path, task: str):
    """The steps take a second until the last event, so that no event comes after the end on any machine."""
    outcome = run(tmp_path, seconds=600, seed=1, nodes=3, kinds=FIVE, gap=(10, 15), steps=120, step_seconds=1,
                  reproducible=True, task=task, count=len(FIVE))
    assert not outcome.problems, "\n".join(outcome.problems)
    assert {event.kind for event in outcome.happened} == set(FIVE)
