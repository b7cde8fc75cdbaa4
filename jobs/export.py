"""Write a checkpoint as a Hugging Face folder, as a Ray job.

    ray job submit --working-dir . -- python -m jobs.export s3://bucket/runs/first s3://bucket/models/first

Safe to submit again: the same checkpoint gives the same files. The exit code is 0 when the folder is written, 2 when
there is a user error, 1 for a bug in Tidewheel.
"""

from __future__ import annotations

import sys

from tidewheel.cli import leave, run_command


def main() -> int:
    """Run `tidewheel checkpoint export`."""
    return run_command(["checkpoint", "export", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
