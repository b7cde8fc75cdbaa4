"""Stand-ins for Slurm's programs: two "nodes" that are processes of this machine, each with a loopback address."""

from __future__ import annotations

import os
from pathlib import Path

SRUN = """#!/bin/bash
# Starts the command once for each node, passes SIGTERM on, and exits with the largest code.
while [[ "$1" == --* ]]; do shift; done
ended() { kill -TERM "${pids[@]}" || true; }
trap ended TERM INT
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME=node$node "$@" &
    pids+=($!)
done
largest=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while kill -0 "$pid" 2> /dev/null; do code=0; wait "$pid" || code=$?; done
    if [ "$code" -gt "$largest" ]; then largest=$code; fi
done
exit "$largest"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$STAND_IN_LOG"
"""
GETENT = """#!/bin/bash
# node0 is 127.0.0.2, node1 is 127.0.0.3
if [[ "$2" != node* ]]; then exit 2; fi
node="${2#node}"
echo "127.0.0.$((node + 2)) STREAM $2"
"""


def install(folder: Path) -> dict[str, str]:
    """Write the programs into a folder, and return the environment in which they come first.

    Args:
        folder: new; scontrol's calls go to `scontrol.log` in it.
    """
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("getent", GETENT)):
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "STAND_IN_LOG": str(folder / "scontrol.log")}
