"""The effective time of large runs, simulated, beside what is published of real ones.

    python -m tests.benchmarks.effective_time [--runs 8] [--measured FILE]

First the simulator with the times that a publication states, beside the effective time that it states: how far to trust
it. Then ours, with each published rate of failures, from 1,024 to 131,072 GPUs, with the share that each mechanism
contributes. With --measured, also the storms of kills in those files (`tests/benchmarks/storm.py`: the real coordinator
under kills) beside what the simulator says about the same kills. The exit code is 1 when a publication or a storm is
missed by more than 10 points.
"""

from __future__ import annotations

import argparse
import sys

from tidewheel.console import print_table
from tidewheel.plan.config import PER_GPU_HOUR, FailureConfig, GoodputConfig, TierConfig
from tidewheel.plan.measured import StormRow, applied, storms
from tidewheel.plan.mechanisms import effective_times
from tidewheel.plan.recovery import best, table

SIZES = (1_024, 4_096, 16_384, 32_768, 131_072)
RATES = ("llama3", "rsc1", "rsc2", "ft_hsdp")
BOUND = 10.0
"""Points. Publications state neither all times nor the interval between checkpoints."""
EVERY_18_MINUTES = 60 / 18 / 100_000


def recovery(seconds: float, stall: float = 5.0) -> TierConfig:
    """Return the times of a run that recovers from storage in so many seconds after a failure."""
    return TierConfig(detect_seconds=0, restart_seconds=seconds, load_seconds=0, save_stall_seconds=stall,
                      upload_seconds=60)


#: name, GPUs, failures per GPU and hour, times, published effective time in percent, whether that is a lower bound
PUBLISHED = (
    ("Llama 3, minutes for each restart", 16_384, PER_GPU_HOUR["llama3"], recovery(480), 90.0, True),
    ("FT-HSDP's baseline, 10 min", 100_000, EVERY_18_MINUTES, recovery(600), 44.0, False),
    ("FT-HSDP, 3 min", 100_000, EVERY_18_MINUTES, recovery(180), 80.0, False),
    ("ByteRobust, 2 min", 9_600, PER_GPU_HOUR["rsc1"], recovery(120), 97.0, False))


def predicted(storm: StormRow, runs: int) -> float:
    """Return the share of work that the simulator gives a run under the kills of a storm, which hit only its nodes."""
    tier = TierConfig(detect_seconds=0, restart_seconds=storm.rejoined_seconds, load_seconds=storm.load_seconds,
                      save_stall_seconds=0, refresh_seconds=storm.step_seconds, storage_seconds=storm.load_seconds)
    failures = FailureConfig(rate=3600 / storm.kill_seconds / storm.workers, several_share=0.0)
    [row] = best(table(GoodputConfig(gpus=(storm.ranks,), interval_minutes=(3,), tiers={"storm": tier}, days=0.5,
                                     failures=failures, runs=runs, seconds_per_1000_ranks=0.0)))
    return row.goodput * storm.ranks / storm.workers


def main() -> int:
    """Print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--measured", nargs="*", default=[],
                        help="files of tests.benchmarks.measured_times, or of its benchmarks")
    options = parser.parse_args()
    rows, worst = [], 0.0
    for name, gpus, rate, tier, published, at_least in PUBLISHED:
        [row] = best(table(GoodputConfig(gpus=(gpus,), tiers={"theirs": tier}, failures=FailureConfig(rate=rate),
                                         runs=options.runs, seconds_per_1000_ranks=0.0)))
        simulated = 100 * row.goodput
        off = min(0.0, simulated - published) if at_least else simulated - published
        worst = max(worst, abs(off))
        rows.append({"run": name, "GPUs": f"{gpus:,}", "failure every": f"{row.mtbf_seconds / 3600:.2f} h",
                     "published": f"{'above ' * at_least}{published:g} %", "simulated": f"{simulated:.1f} %"})
    print_table(rows, title="the simulator with published times")
    rows = []
    for storm in storms(options.measured):
        if storm.ranks == storm.workers:
            continue  # without spares the run shrinks after each kill, which the simulator does not do
        share = predicted(storm, options.runs)
        worst = max(worst, 100 * abs(share - storm.effective))
        rows.append({"a node is killed each": f"{storm.kill_seconds:g} s", "spares": str(storm.workers - storm.ranks),
                     "measured": f"{100 * storm.effective:.1f} %", "simulated": f"{100 * share:.1f} %"})
    if rows:
        print_table(rows, title="the simulator beside storms of kills: effective time of 300 workers")
    for rate in RATES:
        config = GoodputConfig(gpus=SIZES, failures=FailureConfig(rate=rate), runs=options.runs)
        lines = effective_times(applied(config, options.measured))
        print_table([{"GPUs": f"{item.gpus:,}", "failure every": f"{item.mtbf_seconds / 3600:.2f} h",
                      "effective": f"{100 * item.whole:.2f} %",
                      **{name: f"{100 * (item.whole - share):+.2f}" for name, share in item.without.items()},
                      "none of them": f"{100 * item.none:.2f} %"} for item in lines],
                    title=f"{rate}: effective time, and the points that each mechanism contributes")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
