"""Tests of the save schedule, with a simulated clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.helpers import config
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train.checkpoint_config import CheckpointConfig, MemoryTierConfig
from tidewheel.train.runtime import Saves
from tidewheel.train.save_schedule import LONGEST_SECONDS, SHORTEST_SECONDS, SaveSchedule, young_daly

GOOD = Saves()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def schedule(clock: Clock, *, failures: int = 0, age: float = 0.0, **settings) -> SaveSchedule:
    return SaveSchedule(CheckpointConfig(**settings), started=5000.0 - age, failures=failures, clock=clock,
                        now=lambda: 5000.0)


def steps_saved(plan: SaveSchedule, clock: Clock, steps: int, seconds: float, saves: Saves = GOOD) -> list[int]:
    """Do steps of `seconds` each and return those after which the schedule saved."""
    saved = []
    for step in range(1, steps + 1):
        clock.now += seconds
        if plan.due(step, saves):
            saved.append(step)
            plan.began()
    return saved


def test_saves_follow_steps_seconds_or_both():
    clock = Clock()
    assert steps_saved(schedule(clock, every_steps=4), clock, 10, 1.0) == [4, 8]
    assert steps_saved(schedule(clock, every_steps=0), clock, 10, 1.0) == []
    assert steps_saved(schedule(clock, every_steps=0, every_seconds=3), clock, 10, 1.0) == [3, 6, 9]
    assert steps_saved(schedule(clock, every_steps=5, every_seconds=3), clock, 10, 1.0) == [3, 5, 8, 10]


def test_a_failed_save_is_retried_before_the_next_interval():
    clock = Clock()
    plan = schedule(clock, every_steps=100, retry_seconds=5)
    assert steps_saved(plan, clock, 30, 1.0, Saves(failed=1, seconds=2.0)) == [7, 14, 21, 28]
    assert steps_saved(plan, clock, 30, 1.0, Saves(failed=1, busy=True)) == []


def test_automatic_intervals_follow_cost_and_failures():
    clock = Clock()
    cheap = Saves(seconds=1.0, stall_seconds=0.5)
    expensive = Saves(seconds=100.0, stall_seconds=50.0)
    plan = schedule(clock, every_steps="auto", expected_failure_seconds=10_000)
    assert plan.interval(cheap) == pytest.approx(100.0)
    assert plan.interval(expensive) == pytest.approx(1000.0)
    assert steps_saved(plan, clock, 250, 1.0, cheap) == [100, 200]
    assert schedule(clock, every_steps="auto", failures=3, age=30_000, expected_failure_seconds=10_000
                    ).failure_seconds == pytest.approx(10_000)
    assert schedule(clock, every_steps="auto", failures=99, age=0, expected_failure_seconds=10_000
                    ).interval(cheap) == SHORTEST_SECONDS
    assert steps_saved(schedule(clock, every_steps="auto"), clock, 100, 1.0, Saves(busy=True)) == []


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1, 1e7), st.integers(0, 1000))
def test_an_automatic_interval_is_within_bounds_and_longer_than_a_save(stall, seconds, failure, failures):
    plan = schedule(Clock(), every_steps="auto", failures=failures, expected_failure_seconds=failure)
    interval = plan.interval(Saves(seconds=seconds, stall_seconds=stall))
    assert interval >= max(SHORTEST_SECONDS, seconds)
    assert interval <= max(LONGEST_SECONDS, 2 * seconds)


@given(st.floats(0.01, 100), st.floats(100, 1e6))
def test_young_dalys_interval_wastes_least(cost, failure):
    """The share of lost time, C / T + T / 2M, is smaller at the interval than at shorter and longer ones."""
    def lost(interval: float) -> float:
        return cost / interval + interval / (2 * failure)

    best = young_daly(cost, failure)
    assert lost(best) <= min(lost(best * 1.05), lost(best / 1.05))
    assert math.isclose(lost(best), math.sqrt(2 * cost / failure))


def test_a_schedule_is_built_from_the_settings(tmp_path):
    assert config(tmp_path, "run", "checkpoint.every_steps=auto").checkpoint.every_steps == "auto"
    for wrong in ("checkpoint.every_steps=-1", "checkpoint.every_steps=often", "checkpoint.memory_tier.steps=3",
                  "checkpoint.memory_tier.every_steps=-1", "checkpoint.memory_tier.every_steps=often",
                  "checkpoint.memory_tier.share=0", "checkpoint.memory_tier.share=1.1"):
        with pytest.raises(ConfigError):
            config(tmp_path, "run", wrong)
    assert (config(tmp_path, "run", "checkpoint.memory_tier.every_steps=0", "checkpoint.every_seconds=7").recipe_hash()
            == config(tmp_path, "run").recipe_hash())


def test_settings_of_the_memory_tier_are_accepted_under_their_former_names(tmp_path):
    former = {"every_steps": 5, "memory": {"every_steps": 7, "buddy": False}}
    read = build(CheckpointConfig, former)
    assert read.memory_tier == MemoryTierConfig(every_steps=7, replica=False)
    assert read.canonical()["memory_tier"] == {"every_steps": 7, "share": 0.02, "replica": False}
    overridden = build(CheckpointConfig, former, ["memory_tier.every_steps=3"])
    assert overridden.memory_tier == MemoryTierConfig(every_steps=3, replica=False)
    former_override = build(CheckpointConfig, {"memory_tier": {"every_steps": 3, "replica": False}},
                            ["memory.every_steps=0", "memory.replica=true"])
    assert former_override.memory_tier == MemoryTierConfig(every_steps=0, replica=True)
    with pytest.raises(ConfigError, match=r"'memory_tier\.steps', did you mean 'every_steps'"):
        build(CheckpointConfig, {"memory": {"steps": 3}})
