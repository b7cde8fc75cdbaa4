"""Tests of the number of generators, against how far ahead their rollouts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.post.runs import rollout_run
from tidewheel.post.scaling import Scaling, Training
from tidewheel.storage import store


def scaling(tmp_path: Path, look_ahead: int) -> Scaling:
    rollouts = rollout_run(tmp_path, "run", f"rollouts.look_ahead={look_ahead}", "rollouts.generators.processes=5",
                           "rollouts.generators.min_processes=2").rollouts
    assert rollouts is not None
    return Scaling(rollouts)


def test_generators_that_are_ahead_become_fewer_and_a_waiting_trainer_gets_more(tmp_path: Path):
    scaled = scaling(tmp_path, 2)
    assert [scaled.after(2) for _ in range(12)] == [5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 2]
    assert [scaled.after(1) for _ in range(6)] == [2] * 6, "neither waits for the other"
    assert [scaled.after(0) for _ in range(8)] == [2, 3, 3, 4, 4, 5, 5, 5]
    assert [scaled.after(ahead) for ahead in (2, 2, 1, 2, 2, 0, 2, 2)] == [5] * 8, "not three times in a row"
    in_turns = scaling(tmp_path, 0)
    assert [in_turns.after(0) for _ in range(5)] == [5] * 5, "without a look-ahead each step waits for all of them"


@pytest.mark.parametrize(("rate", "expected"), [(2.0, 3), (0.9, 5), (1.6, 4)])
def test_the_number_settles_where_generators_keep_up(tmp_path: Path, rate: float, expected: int):
    """A trainer makes a step in the time in which a generator makes `rate` fifths of a step's rollouts."""
    scaled, ahead = scaling(tmp_path, 4), 2.0
    counts: list[int] = []
    for _ in range(400):
        ahead = min(4.0, max(0.0, ahead + scaled.processes * rate / 5 - 1))
        counts.append(scaled.after(int(ahead)))
    assert expected - 1 <= min(counts[200:])
    assert max(counts[200:]) <= expected


@pytest.mark.parametrize("wave_steps", [1, 4])
def test_how_far_ahead_rollouts_are_follows_from_the_policies(tmp_path: Path, wave_steps: int):
    run = store(tmp_path)
    training = Training(run, 1, wave_steps)
    assert training.ahead(1) == 1, "the first policy is not there yet"
    for waves in range(4):
        version = waves * wave_steps
        head = {"format": 1, "version": version, "file": "0" * 32 + ".safetensors", "bytes": 1}
        run.write_json(f"policies/{version:08d}.0of1.json", {**head, "hash": "blake3-" + "0" * 64})
        assert [training.ahead(step) for step in (version + 1, version + 2 * wave_steps + 1)] == [0, 2]
    assert Training(run, 1, wave_steps).ahead(5 * wave_steps + 1) == 2


def test_bounds_must_be_in_order(tmp_path: Path):
    with pytest.raises(Exception, match="min_processes 2 is above processes 1; nearest legal choice: 1"):
        rollout_run(tmp_path, "run", "rollouts.generators.min_processes=2")
