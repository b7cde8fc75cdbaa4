"""Tests that a step's positions are a pure function of the batch, the skipped windows and the step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.positions import Positions

FOURS = BatchSizes({"global_sequences": 4}, 1)


@st.composite
def plans(draw: st.DrawFn) -> Positions:
    stages = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    ramp = [{"sequences": size, "tokens": draw(st.integers(1, 20))} for size in stages[:-1]]
    plan = Positions(BatchSizes({"global_sequences": stages[-1], "ramp": ramp}, 1))
    for _ in range(draw(st.integers(0, 4))):  # windows are the batches of several steps in a row
        step, length = draw(st.integers(1, 12)), draw(st.integers(1, 3))
        positions = plan.of_steps(range(step, step + length))
        for part in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
            plan = plan.passing_over((int(part[0]), int(part[-1]) + 1))
    return plan


@given(plans(), st.integers(1, 20))
def test_every_position_is_read_once_or_skipped(plan: Positions, steps: int):
    positions = plan.of_steps(range(1, steps + 1))
    end = plan.end(steps)
    brute = [position for position in range(end)
             if not any(start <= position < stop for start, stop in plan.windows)]
    assert positions.tolist() == brute == [p for step in range(1, steps + 1) for p in plan.of(step).tolist()]
    assert sorted([*brute, *plan.skipped(end).tolist()]) == list(range(end))
    assert plan.steps(range(1, steps + 1)).tolist() == sorted(plan.steps(range(1, steps + 1)).tolist())
    assert len(plan.steps([steps])) == plan.count(steps)


@given(plans())
def test_a_window_changes_no_step_before_it(plan: Positions):
    for index, (start, _) in enumerate(plan.windows):
        before, after = plan.known(index), plan.known(index + 1)
        for step in range(1, 16):
            if before.end(step) <= start:
                assert before.of(step).tolist() == after.of(step).tolist()


def test_wrong_windows_are_refused():
    assert Positions(FOURS).end(0) == 0
    for windows in ([(0, 4), (2, 6)], [(4, 4)], [(-4, 0)]):
        with pytest.raises(ValueError, match="disjoint"):
            Positions(FOURS, windows)
