"""Members that send heartbeats and acknowledge nothing: they do not hear the coordinator."""

from __future__ import annotations

from tests.unit.elastic.world import LIMITS, World
from tidewheel.elastic.connection import RECONNECT_SECONDS


def started(*names: str, sizes: tuple[int, ...] = (1, 2, 3)) -> World:
    world = World(sizes)
    world.start(*names)
    assert world.members == names
    return world


def test_a_deaf_member_is_left_out_if_the_others_wait_for_it():
    world = started("a", "b", "c")
    world.deaf_since["b"] = world.now  # it has not heard that it must join
    world.wait(LIMITS.leave - 1, "a", "b", "c")
    assert world.fenced == []
    world.wait(2, "a", "b", "c")
    assert world.fenced == ["b"]
    world.leave("a", "c")
    assert world.members == ("a", "c")
    [failure] = world.details("failure")
    assert "acknowledged no message for 5" in failure["error"]


def test_a_deaf_member_is_not_looked_for_while_the_generation_makes_progress():
    world = started("a", "b")
    world.deaf_since["b"] = world.now
    for step in range(1, 10):
        world.run(step)
        world.wait(LIMITS.leave - 1, "a", "b")
    assert world.fenced == []


def test_a_member_that_hears_late_is_kept():
    world = started("a", "b")
    world.deaf_since["b"] = world.now
    world.wait(LIMITS.leave - 1, "a", "b")
    del world.deaf_since["b"]
    world.wait(10 * LIMITS.leave, "a", "b")
    assert world.fenced == []


def test_nobody_is_blamed_while_nobody_hears_the_coordinator():
    world = started("a", "b")
    world.deaf_since = {"a": world.now, "b": world.now}
    world.wait(RECONNECT_SECONDS - 1, "a", "b")
    assert world.fenced == []
    world.wait(2, "a", "b")
    assert sorted(world.fenced) == ["a", "b"]
