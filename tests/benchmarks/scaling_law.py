"""Measure how often the intervals of a fitted scaling law contain the true coefficients, on synthetic losses.

    python -m tests.benchmarks.scaling_law [--sets 100]

Each set has 42 runs of a known law, six sizes from 50 M to 8 B on 4 to 100 tokens per parameter, with log-normal noise.
"""

from __future__ import annotations

import argparse

from tests.unit.plan.test_scaling import TRUE, runs
from tidewheel.plan.scaling.fit import fit

TARGET = (70e9, 1.4e12)
"""Parameters and tokens at which the loss is predicted, 15 times the FLOPs of the largest run."""


def covered(sets: int, noise: float) -> dict[str, float]:
    """Return the share of sets whose 90 % interval contains the true value, by value.

    Args:
        sets: number of synthetic sets of runs.
        noise: standard deviation of log L.
    """
    values = {name: lambda law, name=name: getattr(law, name) for name in ("e", "alpha", "beta", "exponent")}
    values["loss at 70 B on 1.4 T"] = lambda law: law.loss(*TARGET)
    hits = dict.fromkeys(values, 0)
    for seed in range(sets):
        found = fit(runs(1000 + seed, noise), resamples=200, seed=seed)
        for name, value_of in values.items():
            interval = found.interval(value_of)
            hits[name] += interval.low <= value_of(TRUE) <= interval.high
    return {name: count / sets for name, count in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=100)
    sets = parser.parse_args().sets
    shares = {noise: covered(sets, noise) for noise in (0.002, 0.005, 0.01)}
    print("| 90 % intervals contain | " + " | ".join(f"noise {100 * noise:g} %" for noise in shares) + " |")
    print("|---|" + "---|" * len(shares))
    for name in next(iter(shares.values())):
        print(f"| {name} | " + " | ".join(f"{100 * share[name]:.0f} %" for share in shares.values()) + " |")


if __name__ == "__main__":
    main()
