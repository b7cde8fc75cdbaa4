"""Ray's autoscaler adds nodes for a pipeline and for a training, and removes them all afterwards.

`python -m tests.benchmarks.autoscaling` prints the times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.benchmarks.autoscaling import GROUPS, Watch, scale_pipeline, scale_training, violations
from tidewheel.cluster.local import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_groups_grow_for_the_work_and_shrink_after_it(tmp_path: Path):
    with LocalCluster(nodes=0, autoscaled=GROUPS, idle_seconds=5) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        watch = Watch(print)
        try:
            seen = {**scale_pipeline(tmp_path, watch), **scale_training(tmp_path, cluster.address, watch)}
            assert not violations(seen, watch), watch.seen
        finally:
            watch.end()
            ray.shutdown()
