"""Compare the simulator of `tidewheel plan goodput` with real runs whose workers are killed at random.

    python -m tests.benchmarks.goodput [--workers 2 2 4 4 8 8] [--seconds 80]

Each run trains a small model on a local cluster. A worker is SIGKILLed every 10 to 20 s and replaced. Each run's
failures are then given to the simulator with the constants (detection, restart, stall, upload) of the other run with
the same number of workers. The exit code is 1 when a prediction is off by more than 10 points.
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
"""Points. A run of minutes has few failures, and one just before a save costs several points."""


def run(folder: Path, name: str, workers: int, *, seconds: float, gap: tuple[float, float], step_seconds: float,
        rng: random.Random) -> str:
    """Train on `workers` workers for about `seconds` and return the run's URI."""
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
    """Run the trainings, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 2, 4, 4, 8, 8])
    parser.add_argument("--seconds", type=float, default=80, help="approximate duration of each run")
    parser.add_argument("--gap", type=float, nargs=2, default=(10.0, 20.0), metavar=("LEAST", "MOST"),
                        help="seconds between kills")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="seconds added to each step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tidewheel-goodput-"))
    try:
        prepare(folder)
        rng = random.Random(options.seed)
        runs = [run(folder, f"{index}-of-{workers}-workers", workers, seconds=options.seconds, gap=tuple(options.gap),
                    step_seconds=options.step_seconds, rng=rng) for index, workers in enumerate(options.workers)]
        lines = predicted_beside_measured(runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(lines, title="goodput of real runs, with the constants of the others")
    return 1 if any(abs(float(line["difference"])) > BOUND for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
