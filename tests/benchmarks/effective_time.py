"""The effective time of large runs, simulated, beside what is published of real ones.

    python -m tests.benchmarks.effective_time [--runs 8] [--measured FILE]

First the simulator with the times that a publication states, beside the effective time that it states: how far to trust
it. Then ours, with each published rate of failures, from 1,024 to 131,072 GPUs, with the share that each mechanism
contributes. The exit code is 1 when a publication is missed by more than 10 points.
"""

from __future__ import annotations

import argparse
import sys

from tidewheel.console import print_table
from tidewheel.plan.config import PER_GPU_HOUR, FailureConfig, GoodputConfig, TierConfig
from tidewheel.plan.measured import applied
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


def main() -> int:
    """Print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--measured", nargs="*", default=[], help="measurement files of control_plane and elastic")
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
