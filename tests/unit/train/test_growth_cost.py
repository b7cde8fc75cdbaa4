"""A wave of a long run costs what the wave has, however many waves came before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.operations import operations
from tests.unit.train.policy.rollouts import random_rollouts, write_rollouts
from tidewheel.shards.appended import Appended
from tidewheel.shards.growing import MOST_WAVES, Growing
from tidewheel.shards.manifest import ShardInfo, shard_name
from tidewheel.shards.rollouts import RolloutSet
from tidewheel.shards.source import Source
from tidewheel.train.batches import BatchDigest

FEW, MANY = 8, 300


class Reading:
    """What a rank of a run has of its set of rollouts, without files for the shards."""

    def __init__(self, folder: Path) -> None:
        manifest = write_rollouts(folder, random_rollouts(4), shards=1)
        head = replace(manifest, shards=(), documents=0, to_come=MOST_WAVES)
        self.known = Growing.of(head)
        self.source = Source.single(str(folder), head, 0)
        self.opened = RolloutSet.open(str(folder), manifest=head)
        share: Any = None
        mesh: Any = SimpleNamespace(leads=True, group=lambda *names: None)
        self.digest = BatchDigest(self.source, share, mesh, share, 1)

    def take_in(self) -> None:
        """Take in a wave."""
        digest = f"{len(self.known.manifest.waves):064x}"[::-1]
        info = ShardInfo(shard_name(f"blake3-{digest}"), 8, 8, 1, f"blake3-{digest}")
        self.known = self.known.grown(self.known.record([info]), "test")
        self.source.grow(self.known.manifest)
        self.opened.follow(self.known.manifest)
        self.digest._number()
        self.known.records(len(self.known.manifest.waves) - 1)


def test_the_next_wave_costs_no_more_operations_after_many_waves(tmp_path: Path):
    reading = Reading(tmp_path)
    costs = []
    for waves in (FEW, MANY):
        while len(reading.known.manifest.waves) < waves:
            reading.take_in()
        costs.append(sorted(operations(reading.take_in) for _ in range(3))[1])
    assert costs[1] <= costs[0] + 10, costs
    count = len(reading.known.manifest.waves)
    assert len(reading.opened._counts.values) == len(reading.digest._names) == count
    assert reading.digest._index[reading.known.manifest.shards[-1].name] == count - 1
    fresh = Source.single(str(tmp_path), reading.known.manifest, 0)
    positions = np.arange(8 * count)
    for ours, theirs in zip(reading.source.locate(positions), fresh.locate(positions)):
        assert np.array_equal(ours, theirs)


def test_appending_copies_each_value_a_constant_number_of_times(monkeypatch: Any):
    copied: list[int] = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda size, **options: copied.append(size) or empty(size, **options))
    values = Appended()
    before = values.values
    for value in range(5000):
        values.extend([value])
    assert values.values.tolist() == list(range(5000))
    assert before.tolist() == []
    assert sum(copied) < 6 * 5000, "the rooms of all arrays together"
