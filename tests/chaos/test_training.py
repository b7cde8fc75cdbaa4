"""A minute of `tests.chaos.training`: a worker and a node are killed, a node is drained; the same bits after it.

In `make test` the first test of `tests/cluster/test_elastic.py` does the same with one event of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.training import run

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(900)]


def test_the_result_of_a_disturbed_run_is_that_of_an_undisturbed_one(tmp_path: Path):
    """The driver's death: `tests/cluster/test_elastic.py`; everything else that may happen: the command."""
    kinds = ["kill_worker", "kill_node", "drain"]
    found = run(tmp_path, seconds=20, seed=1, nodes=3, kinds=kinds, gap=(6, 8), steps=150, reproducible=True)
    assert not found.problems, "\n".join(found.problems)
    assert found.happened
