"""The simulator of `tidewheel plan goodput` beside real runs, whose workers are killed at random.

    python -m tests.benchmarks.goodput [--workers 2 2 4 4 8 8] [--seconds 80]

Each run is a small model on a local cluster; workers die by SIGKILL every 10 to 20 s, and their places are filled
again. Each run's failures are then played to the simulator with the constants (detection, restart, stall, upload) of
the other run of as many workers. Exit code 1 when a prediction is off by more than 10 points.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.events import kill_worker
from tests.chaos.world import disturbed_run, prepare, settings
from tidewheel.console import print_table
from tidewheel.plan.validation import predicted_beside_measured

BOUND = 10.0
"""Points. A run of minutes has a handful of failures: one that comes just before a save is worth several points."""


def run(folder: Path, name: str, workers: int, *, seconds: float, gap: tuple[float, float], step_seconds: float,
        rng: random.Random) -> str:
    """A run on so many workers for so long; its URI."""
    steps = round(0.5 * seconds / (step_seconds + 0.03 * workers))
    config = settings(folder, name, steps, workers=workers, overrides=(
        f"batch.virtual_ranks={max(4, workers)}", f"elastic.min_workers={workers}", "batch.micro_sequences=2"))
    with disturbed_run(folder, config, nodes=1, cpus_per_node=workers, step_seconds=step_seconds) as world:
        world.wait_for(lambda: world.step >= 5, 120)
        until = time.monotonic() + seconds
        while not world.over.wait(timeout=rng.uniform(*gap)) and time.monotonic() < until:
            print(f"{name}, step {world.step}: {kill_worker(world, rng)}", flush=True)
        world.over.wait(timeout=3 * seconds)
        if not world.finished:
            raise RuntimeError(f"the run {name} did not finish: {world.drivers[-1].error}")
    return config.run_uri


def main() -> int:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 2, 4, 4, 8, 8])
    parser.add_argument("--seconds", type=float, default=80, help="of each run, about")
    parser.add_argument("--gap", type=float, nargs=2, default=(10.0, 20.0), metavar=("LEAST", "MOST"),
                        help="seconds between kills")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="added to each step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tidewheel-goodput-"))
    try:
        prepare(folder)
        rng = random.Random(given.seed)
        runs = [run(folder, f"{number}-of-{workers}-workers", workers, seconds=given.seconds, gap=tuple(given.gap),
                    step_seconds=given.step_seconds, rng=rng) for number, workers in enumerate(given.workers)]
        lines = predicted_beside_measured(runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(lines, title="goodput of real runs, with the constants of the others")
    return 1 if any(abs(float(line["difference"])) > BOUND for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
