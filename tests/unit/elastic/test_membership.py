"""The state machine of generations, with a clock that the tests advance."""

from __future__ import annotations

import pytest

from tests.unit.elastic.world import World
from tidewheel.elastic.connection import RECONNECT_SECONDS
from tidewheel.elastic.generation import Phase
from tidewheel.elastic.messages import ExitReason, Left, Stop


@pytest.fixture
def world():
    world = World()
    world.start("a", "b", "c", "d")
    assert world.take_receivers("join") == ["a", "b", "c", "d"]
    world.run(1)
    return world


def test_the_first_generation_waits_for_those_that_start():
    world = World()
    world.membership.expect(["a", "b", "c"], world.now, anew=True)
    world.come("a", "b")
    assert world.members == ()
    world.wait(61, "a", "b")
    assert world.members == ("a", "b")


def test_a_full_size_does_not_wait():
    world = World((1, 2))
    world.membership.expect(["a", "b", "c"], world.now, anew=True)
    world.come("c", "a")
    assert world.members == ("a", "c")


def test_survivors_continue_without_a_lost_member(world):
    world.lose("b")
    assert world.take_receivers("abort") == ["a", "c", "d"]
    world.leave("a", "c")
    assert world.membership.phase is Phase.ENDING
    world.leave("d")
    assert world.members == ("a", "c")  # three do not divide
    assert world.number == 1
    [(_, failure)] = [event for event in world.events if event[0] == "failure"]
    assert failure["ranks"] == [1]
    assert failure["error"] == "b died"  # the cause, not the errors of its peers
    world.run(2)
    assert world.kinds()[-1] == "recovered"


def test_members_are_told_once_to_leave_however_many_are_lost():
    names = [f"w{number:03d}" for number in range(64)]
    world = World(tuple(range(1, 65)))
    world.start(*names)
    world.lose("w000")
    world.leave(*names[1:20])
    world.lose(*names[20:30])
    world.leave(*names[30:])
    assert sorted(world.take_receivers("abort")) == names[1:]  # not 63 + 62 + 61 ...
    assert world.members == tuple(names[1:20] + names[30:])


def test_a_loss_is_the_cause_though_an_echo_is_reported_first(world):
    world.leave("a")
    world.lose("b")
    world.leave("c", "d")
    assert [detail["error"] for kind, detail in world.events if kind == "failure"] == ["b died"]


def test_losses_while_members_leave_are_one_failure(world):
    world.lose("b", "c")
    world.leave("a")
    world.lose("d")
    assert world.members == ("a",)
    assert world.kinds().count("failure") == 1


def test_nodes_that_are_lost_one_after_the_other_never_end_the_run():
    """The losses come before the next generation's first new step. No worker is blamed, and the pauses stay short."""
    names = [f"w{index}" for index in range(16)]
    world = World(tuple(range(1, 17)))
    world.start(*names)
    world.run(1000)
    for victim in names[:10]:
        world.lose(victim)
        world.leave(*world.members)
        world.wait(61, *names)
        assert world.membership.phase is Phase.RUNNING
    assert world.members == tuple(names[10:])
    assert {detail["recovery"] for detail in world.details("failure")} == {"in_place"}


def test_a_third_loss_without_progress_is_followed_by_a_pause(world):
    world.lose("b")
    world.leave("a", "c", "d")
    world.lose("a")
    world.leave("c")
    assert world.members == ("c", "d")  # at once
    world.lose("c")
    world.leave("d")
    assert world.members == ()
    world.wait(1.5, "d")
    assert world.members == ("d",)


def test_losses_while_steps_are_repeated_are_not_followed_by_a_pause(world):
    """The run had to go back to a checkpoint in storage: in a storm, pauses grew to a minute until it had caught up."""
    world.run(100)
    for victim in "bcd":
        world.come(f"{victim}2")
        world.lose(victim)
        world.leave(*world.members)
        assert world.members
        world.run(2)


def test_losses_that_are_far_apart_are_not_followed_by_a_pause(world):
    """A try that lasted longer than the pause before the next is no quick repetition."""
    names = {"a", "b", "c", "d"}
    for victim in "bcd":
        world.wait(5, *names)
        world.come(f"{victim}2")
        names |= {f"{victim}2"}
        world.lose(victim)
        names.discard(victim)
        world.leave(*world.members)
        assert world.members


def test_a_member_that_does_not_leave_is_cut_off(world):
    world.lose("b")
    world.leave("a", "c")
    world.wait(4, "a", "c", "d")
    assert world.membership.phase is Phase.ENDING
    world.wait(2, "a", "c", "d")
    assert world.fenced == ["d"]
    assert world.members == ("a", "c")


def test_a_member_that_uses_its_cpu_has_more_time_to_leave(world):
    """On a busy machine a healthy survivor may need longer than the limit."""
    world.lose("b")
    world.leave("a", "c")
    world.wait(12, "a", "c", "d", at_work="d")
    assert not world.fenced
    world.leave("d")
    assert world.members == ("a", "c")  # three do not divide
    assert "d" in world.membership.workers


def test_a_member_that_leaves_too_slowly_is_cut_off(world):
    world.lose("b")
    world.leave("a")
    world.wait(12, "a", "c", "d", at_work="d")
    assert world.fenced == ["c"]
    world.wait(4, "a", "d")
    assert world.fenced == ["c"]
    world.wait(2, "a", "d")
    assert world.fenced == ["c", "d"]
    other = World((3,))
    other.start("a", "b", "c")
    other.run(1)
    other.lose("b")
    other.leave("a")
    other.wait(29, "a", "c", at_work="c")
    assert not other.fenced
    other.wait(2, "a", "c", at_work="c")
    assert other.fenced == ["c"]


def test_a_silent_member_is_cut_off(world):
    world.wait(2.5, "a", "b", "d")
    assert not world.fenced
    world.wait(1, "a", "b", "d")
    assert world.fenced == ["c"]
    assert world.take_receivers("abort") == ["a", "b", "d"]


def test_a_silent_member_is_kept_while_the_generation_progresses(world):
    for step in range(2, 12):
        world.wait(1, "a", "b", "d")
        world.membership.beat("a", world.number, step, world.now)
    assert not world.fenced


def test_a_single_worker_may_be_silent_for_longer():
    world = World()
    world.start("a")
    world.run(1)
    world.wait(29)
    assert not world.fenced
    world.wait(2)
    assert world.fenced == ["a"]


def test_time_in_which_the_coordinator_was_stopped_does_not_count(world):
    world.wait(1, "a", "b", "c", "d")
    world.now += 30
    world.membership.tick(world.now)
    assert not world.fenced


def test_time_in_which_all_were_silent_does_not_count_against_the_last_to_return(world):
    """The coordinator's network was away, and the workers reconnect one after the other."""
    world.wait(1, "a", "b", "c", "d")
    world.now += 0.2
    world.membership.beat("b", world.number, 0, world.now)  # beats do not come at the same instant
    world.wait(12)
    assert world.fenced == []
    world.wait(2, "c")
    world.wait(3, "a", "c", "d")
    assert world.fenced == ["b"], "a worker that does not return is still detected"


def test_silent_workers_are_cut_off_once_they_stop_reconnecting(world):
    world.wait(RECONNECT_SECONDS - 1)
    assert world.fenced == []
    world.wait(2)
    assert sorted(world.fenced) == ["a", "b", "c", "d"]


def test_a_new_worker_joins_at_a_step_boundary():
    world = World((1, 2))
    world.start("a")
    world.run(3)
    world.membership.expect(["b"], world.now)
    world.come("b")
    assert world.members == ("a",)
    world.wait(1.5, "a", "b")
    assert world.take_receivers("stop") == ["a"]
    world.leave("a", reason=ExitReason.PREEMPTED)
    assert world.members == ("a", "b")
    [(_, resize)] = [event for event in world.events if event[0] == "resize"]
    assert (resize["from"], resize["to"], resize["reason"]) == (1, 2, "join")
    assert "failure" not in world.kinds()


def test_a_drained_member_leaves_at_a_step_boundary(world):
    world.membership.drain(["node of a"])
    world.wait(0.2, *"abcd")
    assert world.take_receivers("stop") == ["a", "b", "c", "d"]
    world.leave(*"abcd", reason=ExitReason.PREEMPTED)
    assert world.members == ("b", "c")
    world.lose("a")  # its node goes away, which disturbs no other worker
    assert world.membership.phase is Phase.RUNNING


def test_a_loss_during_a_planned_change_is_a_failure(world):
    world.membership.drain(["node of a"])
    world.wait(0.2, *"abcd")
    world.leave("a", "b", reason=ExitReason.PREEMPTED)
    world.lose("c")
    world.leave("d")
    assert world.members == ("b", "d")
    assert "failure" in world.kinds()


def test_the_run_is_over_when_all_members_have_finished(world):
    world.come("spare")
    world.leave("a", "b", "c", reason=ExitReason.FINISHED)
    assert world.membership.phase is Phase.RUNNING
    world.leave("d", reason=ExitReason.FINISHED)
    assert world.membership.phase is Phase.OVER
    assert sorted(world.take_receivers("over")) == ["a", "b", "c", "d", "spare"]


def test_training_continues_if_rank_0_is_lost_before_it_wrote_the_result(world):
    world.leave("b", "c", "d", reason=ExitReason.FINISHED)
    world.lose("a")
    assert world.members == ("b", "c")


def test_messages_about_an_older_generation_change_nothing(world):
    world.lose("b")
    world.leave("a", "c", "d")
    world.membership.left(["a"], Left(0, ExitReason.FAILED, "late"), world.now)
    world.membership.beat("a", 0, 99, world.now)
    assert world.membership.phase is Phase.RUNNING
    assert world.membership.generation.step == 0


def test_a_run_is_stopped_with_everything_saved(world):
    assert world.membership.stop_run() == (True, None)
    world.wait(0.2, *"abcd")
    assert [message.save for _, message in world.sent if isinstance(message, Stop)] == [True] * 4
    world.leave(*"abcd", reason=ExitReason.PREEMPTED, saved_step=17)
    assert world.membership.phase is Phase.STOPPED
    assert world.membership.stop_run() == (True, 17)
    assert world.members == tuple("abcd")  # no further generation is formed


def test_a_run_that_has_not_begun_is_stopped_at_once():
    world = World()
    world.membership.expect(["a"], world.now, anew=True)
    assert world.membership.stop_run() == (False, None)


def test_a_run_stops_despite_a_loss_meanwhile(world):
    world.membership.stop_run()
    world.wait(0.2, *"abcd")
    world.lose("b")
    world.leave("a", "c", "d")
    assert world.number == 1
    world.run(2)
    world.wait(0.2, "a", "c")
    world.leave("a", "c", reason=ExitReason.PREEMPTED, saved_step=3)
    assert world.membership.stop_run() == (True, 3)


def test_workers_of_an_avoided_node_leave_at_a_step_boundary(world):
    """As in a drain, except that its workers are used again when no others are left."""
    slow, others = world.membership.worker_at(1)
    assert (slow.name, others) == (world.members[1], len(world.members) - 1)
    assert world.membership.worker_at(99) is None
    world.run(1)
    world.membership.avoid(slow.node)
    world.wait(2, *world.members)
    assert set(world.take_receivers("stop")) == set(world.members)
    before = world.members
    world.leave(*before, reason=ExitReason.PREEMPTED)
    assert slow.name not in world.members
    assert world.members
    world.membership.hello(slow.name, slow.node, world.now)
    assert world.membership.workers[slow.name].leaving
    world.run(2)
    world.lose(*[name for name in before if name not in (slow.name, *world.members)])  # the standby workers
    world.lose(*world.members)
    world.wait(1, slow.name)
    assert world.members == (slow.name,)
    assert not world.membership.avoided


def test_a_slow_worker_ends_when_its_substitute_trains():
    """It held a CPU that a generator of rollouts waited for, whose own the substitute had taken."""
    world = World((1, 2))
    world.start("a", "slow")
    world.run(1)
    world.membership.avoid("node of slow")
    world.wait(2, "a", "slow")
    world.leave("a", "slow", reason=ExitReason.PREEMPTED)
    assert world.members == ("a",)
    assert not world.fenced, "it is needed if a is lost before the substitute has come up"
    world.come("b")
    world.run(2)
    world.wait(4, "a", "b", "slow")
    world.leave("a", reason=ExitReason.PREEMPTED)
    assert set(world.members) == {"a", "b"}
    assert world.fenced == ["slow"]
    assert set(world.membership.workers) == {"a", "b"}


def test_a_process_that_fails_its_test_does_not_end_the_workers_that_train_on_its_node():
    """They are not asked to probe themselves while they train: the limit would pass before they could answer."""
    world = World((1, 2))
    world.membership.expect({"a": "n", "b": "n"}, world.now, anew=True)
    world.come("a", "b", node="n")
    world.membership.expect({"c": "n"}, world.now)
    world.membership.hello("c", "n", world.now, problem="the disk is full")
    assert world.fenced == ["c"]
    for step in range(1, 300):
        world.run(step)
        world.wait(1, "a", "b")
    assert world.fenced == ["c"]
    assert world.take_receivers("probe") == []
    world.healthy = True
    world.fail("a")  # in the next generation they take part only after a probe
    world.wait(10, "a", "b")
    assert world.asked == []
    assert set(world.take_receivers("probe")) <= {"a", "b"}
    assert world.membership.phase is Phase.RUNNING


def test_too_few_workers_for_too_long_lead_to_a_restart():
    world = World((2, 4))
    world.start("a", "b")
    world.run(1)
    world.lose("b")
    world.leave("a")
    world.wait(119, "a")
    assert not world.take_receivers("raise")
    world.wait(2, "a")
    assert world.take_receivers("raise") == ["a"]


@pytest.mark.parametrize(("before_the_loss", "grows"), [(2.0, False), (60.0, True)])
def test_growing_must_pay_before_the_next_loss_is_expected(before_the_loss, grows):
    """One worker was lost; letting two workers join would cost a pause of 40 seconds."""
    world = World()
    world.membership._resizer.pause_seconds = 40
    world.start("a", "b", "c", "d")
    world.run(1)
    world.wait(before_the_loss, "a", "b", "c", "d")
    world.lose("b")
    world.leave("a", "c", "d")
    assert len(world.members) == 2
    world.run(2)
    world.come("e")
    world.take_receivers("stop")
    world.wait(30, *world.membership.workers)
    assert bool(world.take_receivers("stop")) is grows


def test_rank_0_is_on_a_node_that_stays_if_there_is_one():
    world = World()
    world.membership.expect(["a", "b", "c", "d"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.come("c")
    world.come("d", spot=True)
    assert world.members == ("c", "a", "b", "d")  # the others in the order in which they joined
    world.run(1)
    world.lose("c")
    world.leave("a", "b", "d")
    assert world.members == ("a", "b")  # only spot workers are left


def test_a_new_worker_on_a_node_that_stays_takes_rank_0():
    world = World((1, 2))
    world.membership.expect(["a", "b"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.run(1)
    world.come("d", spot=True)
    world.come("c")
    assert world.members == ("a", "b")  # the generation is not interrupted for this
    world.lose("b")
    world.leave("a")
    assert world.members == ("c", "a")
    world.run(2)
    world.leave("c", "a")
    assert world.members == ("c", "a")


def test_a_worker_on_a_node_that_stays_is_preferred_to_a_spot_worker():
    world = World((2,))
    world.membership.expect(["a", "b"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.run(1)
    world.come("c")
    world.leave("a", "b")
    assert world.members == ("c", "a")
