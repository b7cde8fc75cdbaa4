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
