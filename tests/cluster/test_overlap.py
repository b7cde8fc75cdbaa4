"""A training starts before its pipeline has ended, on a real Ray cluster.

`tests/unit/workflow/test_overlap.py` tests the same without Ray as part of `make test`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.small_ray import small_ray
from tests.unit.workflow.test_overlap import overlapped
from tidewheel.workflow.graph import Node
from tidewheel.workflow.launch import RayLauncher, execute

pytestmark = [pytest.mark.cluster, pytest.mark.long]


class FromHere(RayLauncher):
    """Launcher that runs the pipeline's driver in this process, where the test can hold back a wave."""

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        if node.kind == "pipeline":
            return execute(self.task(node, max_workers), self._output, node.id)
        return super().launch(node, max_workers)


def test_training_begins_with_the_first_wave(tmp_path):
    with small_ray(2):
        overlapped(tmp_path, FromHere)
