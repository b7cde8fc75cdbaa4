"""Compare every preference loss with TRL's `_compute_loss` on one batch, in fp32: value, metrics and gradient.

    python -m tests.benchmarks.preference_losses

Exit code 1 if a relative difference is 1e-6 or more. It needs `pip install trl==1.16.0`, and takes ten seconds.
"""

from __future__ import annotations

import logging
import sys
import warnings

from tests.unit.train.preferences.oracle import TABLE, compare

LIMIT = 1e-6


def main() -> int:
    """Print a row for each loss, and return the exit code."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print("| loss | batch | value | relative difference of the value | of the gradient | of the metrics |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for row in TABLE:
        found = compare(row)
        worst = max(worst, found.worst)
        print(f"| {row.name} | {row.pairs[0]} | {found.loss:.6f} | {found.loss_difference:.1e} | "
              f"{found.gradient_difference:.1e} | {found.metric_difference:.1e} |", flush=True)
    print(f"\n{len(TABLE)} losses; the largest relative difference is {worst:.1e}, the limit is {LIMIT:g}")
    return int(worst >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
