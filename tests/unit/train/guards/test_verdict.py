"""Who is named when workers find different values."""

from __future__ import annotations

import itertools

import pytest

from tidewheel.train.guards.verdict import of_computations, of_replicas, of_values

RIGHT, WRONG, OTHER = 1, 2, 3


@pytest.mark.parametrize(("found", "ranks", "certain"), [
    ([(0, RIGHT), (1, RIGHT), (0, RIGHT), (2, RIGHT)], (), True),
    ([(0, WRONG), (1, RIGHT), (0, RIGHT), (2, RIGHT)], (0,), True),  # for one step
    ([(0, RIGHT), (1, WRONG), (0, RIGHT), (2, RIGHT)], (1,), True),
    ([(0, WRONG), (1, RIGHT), (0, WRONG), (2, RIGHT)], (0,), True),  # lasting
    ([(0, WRONG), (1, RIGHT), (0, OTHER), (2, RIGHT)], (0,), True),
    ([(0, WRONG), (1, RIGHT), (0, RIGHT)], (0,), True),  # two workers, for one step
    ([(0, WRONG), (1, RIGHT), (0, OTHER)], (0,), True),  # two workers, never the same
    ([(0, WRONG), (1, RIGHT), (0, WRONG)], (0, 1), False),  # two workers, always the same
    ([(0, WRONG), (0, RIGHT), (0, RIGHT)], (0,), True)])  # a single worker
def test_the_wrong_rank_is_named(found: list[tuple[int, int]], ranks: tuple[int, ...], certain: bool):
    for order in itertools.permutations(found):
        assert of_values(order) == (ranks, certain)


def test_most_copies_are_right():
    assert of_replicas("weights", [(0, RIGHT), (1, RIGHT)]) is None
    finding = of_replicas("weights", [(0, RIGHT), (1, RIGHT), (2, WRONG)])
    assert finding is not None
    assert (finding.ranks, finding.certain, finding.text) == ((2,), True, "rank 2")
    finding = of_replicas("weights", [(3, RIGHT), (5, WRONG)])
    assert finding is not None
    assert (finding.ranks, finding.certain, finding.text) == ((3, 5), False, "one of the ranks 3, 5")


def test_what_is_certain_outweighs_what_is_possible():
    finding = of_computations("gradient", {0: [(0, RIGHT), (1, WRONG), (0, RIGHT), (2, RIGHT)],
                                           1: [(1, WRONG), (3, RIGHT)], 2: [(0, RIGHT), (2, RIGHT)]})
    assert finding is not None
    assert (finding.ranks, finding.certain, sorted(finding.evidence)) == ((1,), True, ["0", "1"])
    assert of_computations("gradient", {0: [(0, RIGHT), (1, RIGHT)]}) is None
