"""Measure what `tidewheel plan goodput` assumes otherwise, and write it into one file.

    python -m tests.benchmarks.measured_times --output measured.json [--only NAME ...] [--take FILE ...]
    tidewheel plan goodput --measured measured.json --mechanisms

It runs short forms of the benchmarks, one after the other, each in a process of its own (about 12 minutes on two idle
cores):

- control_plane: the last survivor joins again after a death among 1,000 workers;
- elastic: a worker is killed, a node freezes, and a recovery with new processes, on a local cluster;
- memory_tier: training stands still for a copy in memory and for a save to storage, with 125 M parameters;
- silent_corruption: processor time of the checks;
- storm: a node of 300 workers is killed every 60 s, with one node that stands by.

Files that a benchmark has written with --output may be taken instead. The exit code is 1 if a benchmark writes no
file, or misses its own goal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tidewheel.plan.config import GoodputConfig
from tidewheel.plan.measured import applied, read

BENCHMARKS = {
    "control_plane": ("--workers", "256", "1000", "--deaths", "1", "10"),
    "elastic": ("--ours-only", "--only", "worker", "frozen", "plain"),
    "memory_tier": ("--rounds", "2", "--wait-steps", "10"),
    "silent_corruption": ("--flips", "10", "--clean-steps", "200"),
    "storm": ("--minutes", "8", "--kills", "60", "--spares", "1"),
}
"""Arguments of the short form of each benchmark. The name is also the kind of its file."""
MOST_SECONDS = 1200.0


def run(name: str, folder: Path) -> tuple[list[Any], str]:
    """Run a benchmark and return what it measured, and a problem or ""."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *BENCHMARKS[name], "--output", str(file)]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    try:
        code = subprocess.run(command, timeout=MOST_SECONDS, stdout=sys.stderr).returncode
    except subprocess.TimeoutExpired:
        return [], f"{name} took more than {MOST_SECONDS:g} s"
    if not file.exists():
        return [], f"{name} ended with code {code} and wrote nothing"
    return list(read(str(file))), f"{name} missed its goal" if code else ""


def machine() -> str:
    """Return where and when this was measured."""
    load = os.getloadavg()[0]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load:.0f} at the start, {when}"


def main() -> int:
    """Measure, write the file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--take", nargs="*", default=[], help="files of benchmarks that ran before")
    options = parser.parse_args()
    where = machine()
    parts = [part for file in options.take for part in read(file)]
    problems = []
    with tempfile.TemporaryDirectory(prefix="tw-measured-") as folder:
        for name in options.only:
            if any(part.kind == name for part in parts):
                continue
            measured, problem = run(name, Path(folder))
            parts += measured
            problems += [problem] if problem else []
    content = {"kind": "measurements", "machine": where, "parts": [part.model_dump() for part in parts]}
    Path(options.output).write_text(json.dumps(content, indent=2))
    if parts:
        settings = applied(GoodputConfig(), [options.output])
        name, tier = next(iter(settings.tiers.items()))
        for key, value in {"seconds_per_1000_ranks": settings.seconds_per_1000_ranks, **tier.model_dump()}.items():
            print(f"{key}: {value:.4g}")
    print("\n".join(problems) or "every benchmark met its goal")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
