"""`ray job submit`, as the README has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tidewheel.cluster.local import LocalCluster

ROOT = Path(__file__).parents[2]


def submitting(cluster: LocalCluster, *command: str) -> subprocess.Popen[str]:
    """Start `ray job submit --working-dir . -- COMMAND`; its output has the job's logs.

    Args:
        cluster: with a dashboard.
        command: of the job.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= cluster.client_environment
    ray = str(Path(sys.executable).parent / "ray")
    return subprocess.Popen(
        [ray, "job", "submit", "--address", cluster.dashboard_url, "--working-dir", ".", "--", *command], cwd=ROOT,
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
