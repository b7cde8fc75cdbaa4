from dataclasses import replace

import pytest

from tidewheel.elastic.policy import FailureBudget, HoldState, Move, Resizer, View

CALM = View(time=100.0, size=2, slots=2, leaving=0, hold=HoldState.NONE, stepped=True)


@pytest.fixture
def resizer():
    return Resizer((1, 2, 4), join_wait_seconds=5, interval_seconds=10, patience_seconds=60)


def at(view, seconds, **changes):
    return replace(view, time=view.time + seconds, **changes)


def test_nothing_changes_nothing_happens(resizer):
    assert all(resizer.decide(at(CALM, second)).move is Move.NOTHING for second in range(100))


def test_joins_are_coalesced_and_only_legal_sizes_are_asked_for(resizer):
    assert resizer.decide(at(CALM, 0, slots=3)).move is Move.NOTHING
    assert resizer.decide(at(CALM, 20, slots=3)).move is Move.NOTHING  # 3 does not divide: no larger legal size
    assert resizer.decide(at(CALM, 21, slots=4)).move is Move.NOTHING  # just came
    assert resizer.decide(at(CALM, 25, slots=5)).move is Move.NOTHING  # one more: wait anew
    decision = resizer.decide(at(CALM, 30.5, slots=5))
    assert (decision.move, decision.size, decision.reason) == (Move.ASK, 4, "join")


def test_growth_waits_for_the_first_step(resizer):
    view = at(CALM, 0, slots=4, stepped=False)
    assert resizer.decide(view).move is Move.NOTHING
    assert resizer.decide(at(view, 50)).move is Move.NOTHING


def test_a_lost_node_is_not_a_resize(resizer):
    """The failure path shrinks the group; the planned path only grows or leaves."""
    assert resizer.decide(at(CALM, 0, slots=1)).move is Move.NOTHING


def test_a_drain_does_not_wait(resizer):
    decision = resizer.decide(at(CALM, 0, slots=1, leaving=1))
    assert (decision.move, decision.size, decision.reason) == (Move.ASK, 1, "drain")


def test_a_drained_worker_moves_to_a_spare_node(resizer):
    assert resizer.decide(at(CALM, 0, slots=2, leaving=1)).move is Move.ASK
    decision = resizer.decide(at(CALM, 1, slots=2, leaving=1, hold=HoldState.HELD))
    assert (decision.move, decision.size) == (Move.RESIZE, 2)


def test_the_group_is_replaced_only_when_the_hold_is_confirmed(resizer):
    resizer.decide(at(CALM, 0, slots=4))
    assert resizer.decide(at(CALM, 6, slots=4)).move is Move.ASK
    assert resizer.decide(at(CALM, 7, slots=4, hold=HoldState.ASKED)).move is Move.NOTHING
    decision = resizer.decide(at(CALM, 8, slots=4, hold=HoldState.HELD))
    assert (decision.move, decision.size) == (Move.RESIZE, 4)


def test_called_off_when_the_new_node_is_gone_or_nobody_answers(resizer):
    resizer.decide(at(CALM, 0, slots=4))
    assert resizer.decide(at(CALM, 6, slots=4)).move is Move.ASK
    assert resizer.decide(at(CALM, 8, hold=HoldState.HELD)).move is Move.CALL_OFF
    assert resizer.decide(at(CALM, 67, slots=4, hold=HoldState.ASKED)).move is Move.CALL_OFF


def test_failures_without_progress_end_the_run():
    budget = FailureBudget(max_without_progress=2)
    assert [budget.charge(step) for step in (10, 20, 20, 20)] == [True, True, True, False]


def test_failures_with_progress_never_do():
    budget = FailureBudget()
    assert all(budget.charge(step) for step in range(100))


def test_the_total_can_be_bounded():
    budget = FailureBudget(max_failures=2)
    assert [budget.charge(step) for step in range(3)] == [True, True, False]
