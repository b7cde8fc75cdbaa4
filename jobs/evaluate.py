"""Evaluate a checkpoint as a Ray job.

    ray job submit --working-dir . -- python -m jobs.evaluate s3://bucket/runs/first --data s3://bucket/clean/validation

Print loss, perplexity and bits per byte of each validation set. The exit code is 0 on success, 2 when
there is a user error, 1 for a bug in Tidewheel.
"""

from __future__ import annotations

import sys

from tidewheel.cli import leave, run_command


def main() -> int:
    """Run `tidewheel evaluate`."""
    return run_command(["evaluate", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
