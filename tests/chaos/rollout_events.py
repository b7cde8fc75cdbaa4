"""Events that disturb a run of reinforcement learning: those of `tests.chaos.events`, and some for its generators."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from tests.chaos import events
from tests.chaos.events import EVENTS, Event, later, send
from tests.chaos.world import World
from tidewheel.train.config import TrainConfig

SAVE_SECONDS = 10.0
"""Longest wait for a save: the run trains only a few steps for each event."""
START_SECONDS = 60.0
"""Longest wait until the run has come to its gate, so that a save follows when the gate opens."""


def kill_generator(world: World, rng: random.Random) -> str:
    return _kill(sorted(world.generators()), rng, 1)


def kill_generators(world: World, rng: random.Random) -> str:
    """Kill all generators at once."""
    pids = sorted(world.generators())
    return _kill(pids, rng, len(pids))


def stop_generator(world: World, rng: random.Random) -> str:
    """Stop a generator, which closes no connection. In half of the events it continues after 20 s."""
    pids = sorted(world.generators())
    if not pids:
        return "no generator was there"
    pid = rng.choice(pids)
    send(pid, signal.SIGSTOP)
    if rng.random() < 0.5:
        later(20, lambda: send(pid, signal.SIGCONT))
        return f"generator {pid}, woken after 20 s"
    return f"generator {pid}"


def kill_both(world: World, rng: random.Random) -> str:
    """Kill a generator and a worker at once."""
    workers = sorted(world.trainers())
    return f"{_kill(sorted(world.generators()), rng, 1)}, workers: {_kill(workers, rng, 1)}"


def kill_during_save(world: World, rng: random.Random) -> str:
    """Let the run train to its next save, and kill a worker meanwhile."""
    gate = Path(world.environment["CHAOS_GATE"])
    world.wait_for(lambda: world.has_done(int(gate.read_text())) and world.trainers(), START_SECONDS)
    later(0.1, lambda: open_until(gate, int(gate.read_text()) + world.config.checkpoint.every_steps))
    return events.kill_during_save(world, rng, SAVE_SECONDS)


def open_until(gate: Path, step: int) -> None:
    """Let the run train until a step.

    Args:
        gate: see CHAOS_GATE in `tests.chaos.driver`.
        step: the last one that it may do.
    """
    new = gate.with_suffix(".new")
    new.write_text(str(step))
    os.replace(new, gate)


def _kill(pids: list[int], rng: random.Random, count: int) -> str:
    victims = rng.sample(pids, min(count, len(pids)))
    for pid in victims:
        send(pid, signal.SIGKILL)
    return ", ".join(map(str, victims)) or "none was there"


ROLLOUT_EVENTS: dict[str, Event] = {
    **EVENTS, **{function.__name__: function for function in (
        kill_generator, kill_generators, stop_generator, kill_both, kill_during_save)}}


def usual_of_rollouts(config: TrainConfig) -> list[str]:
    """Return the events that a run can be disturbed with, see `events.usual`."""
    return [kind for kind in ROLLOUT_EVENTS if kind not in EVENTS or kind in events.usual(config)]
