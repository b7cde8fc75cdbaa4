"""Count the interleavings of two drivers on one run that are checked, with crashes, lost answers and late writes.

    python -m tests.benchmarks.interleavings [--states 100000] [--histories 2000]

Two drivers take a run over and commit checkpoints. Their protocol (`tidewheel.commit_protocol`) is explored request by
request in a model of the store. After each one no reader may see a stale record, a commit that was undone, one that
counts twice, or one short of those acknowledged (tests/unit/test_commit_protocol.py). Equal states are checked once, so
the states stand for many more interleavings: the paths through them, which are counted. `all` says whether the drivers
can reach no further state. The last rows are random whole histories with up to three faults each. The exit code is 1 if
a check fails, or if fewer than a million interleavings were checked.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from tests.unit.test_commit_protocol import Explorer, State, check
from tidewheel.console import print_table

WANTED = 1_000_000
CASES = ((1, True, 0), (2, True, 0), (1, True, 1), (2, True, 1), (1, False, 0), (1, False, 1))
"""Commits of each driver, whether the store honours conditional creates, and faults in a history."""


def explore(explorer: Explorer, most: int) -> tuple[int, int, bool]:
    """Check states in the order of their distance from the start.

    Args:
        explorer: of two drivers.
        most: states to check; the last layer is finished.

    Returns:
        the number of states, of the interleavings that lead to the ends of what was checked, and whether it was all.
    """
    layer, states, ended = {State(): 1}, 0, 0
    while layer and states < most:
        following: dict[State, int] = {}
        for state, ways in layer.items():
            states += 1
            successors = explorer.successors(state)
            for after in successors:
                check(state, after)
                following[after] = following.get(after, 0) + ways
            ended += 0 if successors else ways
        layer = following
    return states, ended + sum(layer.values()), not layer


def histories(conditional: bool, count: int) -> int:
    """Check whole random histories with up to three faults; return the requests in them."""
    choose, requests = random.Random(7), 0
    for _ in range(count):
        explorer, state = Explorer(2, conditional, faults=3, tidy=True), State()
        while successors := explorer.successors(state):
            after = choose.choice(successors)
            check(state, after)
            state = after
            requests += 1
    return requests


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=100_000)
    parser.add_argument("--histories", type=int, default=2_000)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    total = 0
    for commits, conditional, faults in CASES:
        began = time.monotonic()
        states, interleavings, is_all = explore(Explorer(commits, conditional, faults), options.states)
        total += interleavings
        rows.append({"creates": "conditional" if conditional else "overwrite", "commits": commits, "faults": faults,
                     "states": f"{states:,}", "interleavings": f"{interleavings:.1e}", "all": "yes" if is_all else "no",
                     "seconds": round(time.monotonic() - began, 1)})
    for conditional in (True, False):
        began = time.monotonic()
        requests = histories(conditional, options.histories)
        total += options.histories
        rows.append({"creates": "conditional" if conditional else "overwrite", "commits": 2, "faults": "up to 3",
                     "states": f"{requests:,} requests", "interleavings": f"{options.histories:,}", "all": "random",
                     "seconds": round(time.monotonic() - began, 1)})
    print_table(rows, title="two drivers, every check passed")
    return int(total < WANTED)


if __name__ == "__main__":
    sys.exit(main())
