"""A minute of `tests.chaos.training`: a worker, a node and the driver are killed, a node is drained; the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training import run

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(300)]


def test_the_result_of_a_disturbed_run_is_that_of_an_undisturbed_one(tmp_path: Path):
    kinds = ["kill_worker", "kill_node", "drain", "kill_driver"]
    found = run(tmp_path, seconds=40, seed=1, nodes=3, kinds=kinds, gap=(8, 10), steps=250, reproducible=True)
    assert not found.problems, "\n".join(found.problems)
    assert {event.kind for event in found.happened} >= set(kinds)
