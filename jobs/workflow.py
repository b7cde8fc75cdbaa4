"""Run a workflow as a Ray job; submit it again to resume.

    ray job submit --working-dir . -- python -m jobs.workflow --config s3://bucket/pretrain/workflow.json
    ray job submit --working-dir . -- python -m jobs.workflow --config my_flow.py:flow --output s3://bucket/pretrain

The first form runs what `tw.Workflow.submit` wrote to storage. The exit code is 0 when every step is published, 2 when
there is a user error, 143 when it was stopped (trainings have saved), 1 for a bug in Tidewheel.
"""

from __future__ import annotations

import sys

from tidewheel.cli import leave, run_command


def main() -> int:
    """Run `tidewheel workflow run`."""
    return run_command(["workflow", "run", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
