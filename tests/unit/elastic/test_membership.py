"""The state machine of generations, with a clock that the tests turn."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.elastic.membership import How, Limits, Membership, Phase
from tidewheel.elastic.policy import FailureBudget, Recovery, Resizer

LIMITS = Limits(heartbeat=3, leave=5, start=60, gather=120)


class World:
    """A membership, what it says, and a clock."""

    def __init__(self, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
        self.now, self.sent, self.fenced, self.events = 100.0, [], [], []
        resizer = Resizer(sizes, join_wait_seconds=1, interval_seconds=2, patience_seconds=30)
        self.it = Membership(sizes, resizer, FailureBudget(), self, limits=LIMITS)

    def send(self, worker: str, message: dict[str, Any]) -> None:
        self.sent.append((worker, message))

    def fence(self, worker: str) -> None:
        self.fenced.append(worker)

    def event(self, kind: str, detail: dict[str, Any], at: float | None = None) -> None:
        self.events.append((kind, detail))

    def formed(self, generation: int, size: int) -> None:
        pass

    def start(self, *names: str) -> None:
        self.it.expect(names, self.now, anew=True)
        self.come(*names)

    def come(self, *names: str, spot: bool = False) -> None:
        for name in names:
            self.it.hello(name, f"node of {name}", self.now, spot=spot)

    def run(self, step: int) -> None:
        for name in self.members:
            self.it.beat(name, self.number, step, self.now)

    def leave(self, *names: str, how: How = How.FAILED, text: str = "connection closed") -> None:
        for name in names:
            self.it.left(name, self.number, how, text, self.now)

    def lose(self, *names: str) -> None:
        for name in names:
            self.it.lost(name, f"{name} died", self.now)

    def wait(self, seconds: float, *alive: str) -> None:
        """Time passes; those named give signs of life."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for name in alive:
                self.it.beat(name, self.number, 0, self.now)
            self.it.tick(self.now)

    @property
    def number(self) -> int:
        return self.it.generation.number if self.it.generation else -1

    @property
    def members(self) -> tuple[str, ...]:
        return self.it.generation.members if self.it.generation else ()

    def told(self, what: str) -> list[str]:
        found = [worker for worker, message in self.sent if message["do"] == what]
        self.sent = [one for one in self.sent if one[1]["do"] != what]
        return found

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def world():
    world = World()
    world.start("a", "b", "c", "d")
    assert world.told("join") == ["a", "b", "c", "d"]
    world.run(1)
    return world


def test_the_first_generation_waits_for_those_that_start():
    world = World()
    world.it.expect(["a", "b", "c"], world.now, anew=True)
    world.come("a", "b")
    assert world.members == ()
    world.wait(61, "a", "b")
    assert world.members == ("a", "b")


def test_a_full_size_does_not_wait():
    world = World((1, 2))
    world.it.expect(["a", "b", "c"], world.now, anew=True)
    world.come("c", "a")
    assert world.members == ("a", "c")


def test_survivors_go_on_without_the_lost(world):
    world.lose("b")
    assert world.told("abort") == ["a", "c", "d"]
    world.leave("a", "c")
    assert world.it.phase is Phase.ENDING
    world.leave("d")
    assert world.members == ("a", "c")  # three do not divide
    assert world.number == 1
    [(_, failure)] = [event for event in world.events if event[0] == "failure"]
    assert failure["ranks"] == [1]
    assert failure["error"] == "b died"  # the cause, not what its peers say of it
    world.run(2)
    assert world.kinds()[-1] == "recovered"


def test_whoever_hears_of_it_first_the_cause_is_told(world):
    world.leave("a")
    world.lose("b")
    world.leave("c", "d")
    assert [detail["error"] for kind, detail in world.events if kind == "failure"] == ["b died"]


def test_two_at_once_and_one_while_the_others_leave(world):
    world.lose("b", "c")
    world.leave("a")
    world.lose("d")
    assert world.members == ("a",)
    assert world.kinds().count("failure") == 1


def test_a_death_in_the_new_generation_before_its_first_step_asks_ray_train(world):
    world.lose("b")
    world.leave("a", "c", "d")
    world.lose("a")
    world.leave("c")
    assert world.it.phase is Phase.FAILED
    assert world.it.recovery is Recovery.KEPT
    assert world.told("raise") == ["c", "d"]
    world.start("c", "d")
    assert world.members == ("c", "d")
    assert world.number == 2


def test_who_does_not_leave_is_cut_off(world):
    world.lose("b")
    world.leave("a", "c")
    world.wait(4, "a", "c", "d")
    assert world.it.phase is Phase.ENDING
    world.wait(2, "a", "c", "d")
    assert world.fenced == ["d"]
    assert world.members == ("a", "c")


def test_a_member_that_stands_still_is_cut_off(world):
    world.wait(2.5, "a", "b", "d")
    assert not world.fenced
    world.wait(1, "a", "b", "d")
    assert world.fenced == ["c"]
    assert world.told("abort") == ["a", "b", "d"]


def test_one_that_is_only_late_is_not(world):
    for step in range(2, 12):
        world.wait(1, "a", "b", "d")
        world.it.beat("a", world.number, step, world.now)
    assert not world.fenced


def test_the_only_worker_is_left_in_peace():
    world = World()
    world.start("a")
    world.run(1)
    world.wait(29)
    assert not world.fenced
    world.wait(2)
    assert world.fenced == ["a"]


def test_nobody_is_blamed_for_the_coordinators_own_stand(world):
    world.wait(1, "a", "b", "c", "d")
    world.now += 30
    world.it.tick(world.now)
    assert not world.fenced


def test_a_joiner_is_taken_in_at_a_step_boundary():
    world = World((1, 2))
    world.start("a")
    world.run(3)
    world.it.expect(["b"], world.now)
    world.come("b")
    assert world.members == ("a",)
    world.wait(1.5, "a", "b")
    assert world.told("stop") == ["a"]
    world.leave("a", how=How.MADE_WAY)
    assert world.members == ("a", "b")
    [(_, resize)] = [event for event in world.events if event[0] == "resize"]
    assert (resize["from"], resize["to"], resize["reason"]) == (1, 2, "join")
    assert "failure" not in world.kinds()


def test_a_drained_member_makes_way(world):
    world.it.drain(["node of a"])
    world.wait(0.2, *"abcd")
    assert world.told("stop") == ["a", "b", "c", "d"]
    world.leave(*"abcd", how=How.MADE_WAY)
    assert world.members == ("b", "c")
    world.lose("a")  # its node goes: nobody is disturbed
    assert world.it.phase is Phase.RUNNING


def test_a_death_while_they_make_way_is_a_failure(world):
    world.it.drain(["node of a"])
    world.wait(0.2, *"abcd")
    world.leave("a", "b", how=How.MADE_WAY)
    world.lose("c")
    world.leave("d")
    assert world.members == ("b", "d")
    assert "failure" in world.kinds()


def test_what_nobody_can_mend_ends_the_run(world):
    world.leave("b", how=How.FATAL, text="ShardError: damaged")
    world.leave("a", "c", "d")
    assert world.it.phase is Phase.FAILED
    assert world.told("raise") == ["b"]
    [(_, failure)] = [event for event in world.events if event[0] == "failure"]
    assert failure["restart"] is False


def test_it_is_over_when_all_have_finished(world):
    world.come("spare")
    world.leave("a", "b", "c", how=How.FINISHED)
    assert world.it.phase is Phase.RUNNING
    world.leave("d", how=How.FINISHED)
    assert world.it.phase is Phase.OVER
    assert sorted(world.told("over")) == ["a", "b", "c", "d", "spare"]


def test_rank_0_lost_before_it_wrote_the_result(world):
    world.leave("b", "c", "d", how=How.FINISHED)
    world.lose("a")
    assert world.members == ("b", "c")


def test_what_is_said_of_an_older_generation_changes_nothing(world):
    world.lose("b")
    world.leave("a", "c", "d")
    world.it.left("a", 0, How.FAILED, "late", world.now)
    world.it.beat("a", 0, 99, world.now)
    assert world.it.phase is Phase.RUNNING
    assert world.it.generation.step == 0


def test_a_run_is_stopped_with_everything_saved(world):
    assert world.it.stop_run() == (True, None)
    world.wait(0.2, *"abcd")
    assert [message["save"] for worker, message in world.sent if message["do"] == "stop"] == [True] * 4
    world.leave(*"abcd", how=How.MADE_WAY, text="17")
    assert world.it.phase is Phase.STOPPED
    assert world.it.stop_run() == (True, 17)
    assert world.members == tuple("abcd")  # no other is formed


def test_a_run_that_has_not_begun_is_stopped_at_once():
    world = World()
    world.it.expect(["a"], world.now, anew=True)
    assert world.it.stop_run() == (False, None)


def test_a_death_while_the_run_is_stopped(world):
    world.it.stop_run()
    world.wait(0.2, *"abcd")
    world.lose("b")
    world.leave("a", "c", "d")
    assert world.number == 1
    world.run(2)
    world.wait(0.2, "a", "c")
    world.leave("a", "c", how=How.MADE_WAY, text="3")
    assert world.it.stop_run() == (True, 3)


def test_a_node_that_is_avoided_is_left_at_a_step_boundary(world):
    """As in a drain; but its workers are there when nobody else is."""
    slow, others = world.it.beside(1)
    assert (slow.name, others) == (world.members[1], len(world.members) - 1)
    assert world.it.beside(99) is None
    world.run(1)
    world.it.avoid(slow.node)
    world.wait(2, *world.members)
    assert set(world.told("stop")) == set(world.members)
    before = world.members
    world.leave(*before, how=How.MADE_WAY)
    assert slow.name not in world.members
    assert world.members
    world.it.hello(slow.name, slow.node, world.now)
    assert world.it.workers[slow.name].leaving
    world.run(2)
    world.lose(*[name for name in before if name not in (slow.name, *world.members)])  # who stands by
    world.lose(*world.members)
    world.wait(1, slow.name)
    assert world.members == (slow.name,)
    assert not world.it.avoided


def test_too_few_workers_for_too_long():
    world = World((2, 4))
    world.start("a", "b")
    world.run(1)
    world.lose("b")
    world.leave("a")
    world.wait(119, "a")
    assert not world.told("raise")
    world.wait(2, "a")
    assert world.told("raise") == ["a"]


@pytest.mark.parametrize(("before_the_loss", "grows"), [(2.0, False), (60.0, True)])
def test_growing_must_pay_before_the_next_loss_is_expected(before_the_loss, grows):
    """One worker was lost; the two that come back would cost a pause of 40 seconds."""
    world = World()
    world.it._resizer.pause_seconds = 40
    world.start("a", "b", "c", "d")
    world.run(1)
    world.wait(before_the_loss, "a", "b", "c", "d")
    world.lose("b")
    world.leave("a", "c", "d")
    assert len(world.members) == 2
    world.run(2)
    world.come("e")
    world.told("stop")
    world.wait(30, *world.it.workers)
    assert bool(world.told("stop")) is grows


def test_rank_0_is_on_a_node_that_stays_when_there_is_one():
    world = World()
    world.it.expect(["a", "b", "c", "d"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.come("c")
    world.come("d", spot=True)
    assert world.members == ("c", "a", "b", "d")  # the others as they came
    world.run(1)
    world.lose("c")
    world.leave("a", "b", "d")
    assert world.members == ("a", "b")  # none is left that stays


def test_one_on_a_node_that_stays_takes_rank_0_when_it_comes_in():
    world = World((1, 2))
    world.it.expect(["a", "b"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.run(1)
    world.come("d", spot=True)
    world.come("c")
    assert world.members == ("a", "b")  # nothing is interrupted for it
    world.lose("b")
    world.leave("a")
    assert world.members == ("c", "a")
    world.run(2)
    world.leave("c", "a")
    assert world.members == ("c", "a")


def test_of_more_than_have_a_rank_one_on_a_node_that_stays_is_among_them():
    world = World((2,))
    world.it.expect(["a", "b"], world.now, anew=True)
    world.come("a", "b", spot=True)
    world.run(1)
    world.come("c")
    world.leave("a", "b")
    assert world.members == ("c", "a")
