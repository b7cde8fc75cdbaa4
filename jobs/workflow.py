"""Run a workflow that `tw.Workflow.submit` wrote to storage; submit it again to resume.

    ray job submit --working-dir . -- python -m jobs.workflow --spec s3://bucket/pretrain/workflow.json
"""

from __future__ import annotations

import sys

from tidewheel.cli import run_command


def main() -> int:
    """`tidewheel workflow`, with the resolved workflow given as --spec."""
    return run_command(["workflow", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
