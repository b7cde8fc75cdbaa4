"""Run a data pipeline as a Ray job: documents in, packed shards out.

    ray job submit --working-dir . -- python -m jobs.prepare_data \
        --config pipelines/demo.yaml --input s3://bucket/raw --output s3://bucket/clean

Safe to submit again: published work is not computed twice. The exit code is 0 when the shard
set is published, 2 when there is a user error (the message has the fix), 1 for a bug in Tidewheel.
"""

from __future__ import annotations

import sys

from tidewheel.cli import leave, run_command


def main() -> int:
    """Run `tidewheel data run`, with the pipeline given as --config."""
    return run_command(["data", "run", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
