from dataclasses import replace

import pytest

from tidewheel.elastic.policy import FailureBudget, Move, Recovery, Resizer, View, pays

CALM = View(time=100.0, size=2, slots=2, leaving=0, asked=False, stepped=True)


@pytest.fixture
def resizer():
    return Resizer((1, 2, 4), join_wait_seconds=5, interval_seconds=10, answer_seconds=60)


def at(view, seconds, **changes):
    return replace(view, time=view.time + seconds, **changes)


def test_without_a_change_nothing_is_decided(resizer):
    assert all(resizer.decide(at(CALM, second)).move is Move.NOTHING for second in range(100))


def test_joins_are_coalesced_and_only_legal_sizes_are_asked_for(resizer):
    assert resizer.decide(at(CALM, 0, slots=3)).move is Move.NOTHING
    assert resizer.decide(at(CALM, 20, slots=3)).move is Move.NOTHING  # 3 is no legal size
    assert resizer.decide(at(CALM, 21, slots=4)).move is Move.NOTHING  # the fourth slot has just come
    assert resizer.decide(at(CALM, 25, slots=5)).move is Move.NOTHING  # a fifth one: the wait starts again
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


def test_a_drained_worker_moves_to_one_that_stands_by(resizer):
    decision = resizer.decide(at(CALM, 0, slots=2, leaving=1))
    assert (decision.move, decision.size) == (Move.ASK, 2)
    assert resizer.decide(at(CALM, 1, slots=2, leaving=1, asked=True)).move is Move.NOTHING


def test_a_change_is_called_off_when_the_new_workers_are_gone_or_the_members_are_late(resizer):
    resizer.decide(at(CALM, 0, slots=4))
    assert resizer.decide(at(CALM, 6, slots=4)).move is Move.ASK
    assert resizer.decide(at(CALM, 8, asked=True)).move is Move.CALL_OFF
    assert resizer.decide(at(CALM, 60, slots=4, asked=True)).move is Move.NOTHING
    assert resizer.decide(at(CALM, 67, slots=4, asked=True)).move is Move.CALL_OFF


def test_growth_must_pay_for_its_pause():
    assert pays(2, 4, pause_seconds=2, horizon_seconds=5)  # 4 x 3 s of work exceed 2 x 5 s
    assert not pays(2, 4, pause_seconds=2, horizon_seconds=4)
    assert not pays(4, 5, pause_seconds=2, horizon_seconds=9)
    assert pays(4, 5, pause_seconds=2, horizon_seconds=11)
    assert pays(1, 2, pause_seconds=1e9, horizon_seconds=float("inf"))


def test_a_run_that_is_nearly_over_does_not_grow(resizer):
    late = at(CALM, 0, slots=4, remaining_seconds=3.0)
    assert all(resizer.decide(at(late, second)).move is Move.NOTHING for second in range(60))
    assert resizer.decide(at(late, 60, remaining_seconds=60)).move is Move.ASK


def test_growth_waits_while_workers_are_lost_every_few_seconds(resizer):
    resizer.decide(CALM)
    for _ in range(10):
        resizer.shrunk()
    late = at(CALM, 30, slots=4)
    assert all(resizer.decide(at(late, second)).move is Move.NOTHING for second in (0, 6))  # every 3 s, pause 2 s
    assert resizer.decide(at(late, 60)).move is Move.ASK  # losses have become rarer


def test_each_way_to_recover_is_tried_in_turn():
    budget = FailureBudget(max_without_progress=3)
    recoveries = [budget.charge(step) for step in (10, 10, 10, 10, 20)]
    assert recoveries == [Recovery.IN_PLACE, Recovery.KEPT, Recovery.PLAIN, Recovery.NONE, Recovery.IN_PLACE]


def test_the_first_way_can_be_chosen():
    assert FailureBudget(first=Recovery.KEPT).charge(1) is Recovery.KEPT
    budget = FailureBudget(first=Recovery.PLAIN)
    assert [budget.charge(1) for _ in range(4)] == [*[Recovery.PLAIN] * 3, Recovery.NONE]


def test_failures_with_progress_never_end_the_run():
    budget = FailureBudget()
    assert all(budget.charge(step) is Recovery.IN_PLACE for step in range(100))


def test_the_total_number_of_failures_can_be_limited():
    budget = FailureBudget(max_failures=2)
    assert [budget.charge(step) for step in range(3)] == [Recovery.IN_PLACE, Recovery.IN_PLACE, Recovery.NONE]
