"""Run or resume a training run as a Ray job.

    ray job submit --working-dir . -- python -m jobs.train \
        --config jobs/configs/demo.yaml --set data.uri=s3://bucket/clean --set run.uri=s3://bucket/runs/first

Submit it again with the same run URI to continue from the newest intact checkpoint. The exit code is 0 when
the run has reached its last step, 2 when there is a user error, 1 for a bug in Tidewheel.
"""

from __future__ import annotations

import sys

from tidewheel.cli import leave, run_command


def main() -> int:
    """Run `tidewheel train`, with the configuration given as --config."""
    return run_command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
