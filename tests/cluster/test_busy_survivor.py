"""A survivor leaves a broken generation although one of its threads still waits for storage."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_place import Group, finished, prepare
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.shards.loader import Loader

pytestmark = pytest.mark.cluster

AHEAD = 4
"""Batches that are read ahead."""


def slow_shard(node: str, flag: Path) -> None:
    """Make one read on a's node hang until the test ends, once the flag exists."""
    batch, hung = Loader.batch, []

    def slow(self: Loader, *arguments: Any) -> Any:
        if node == "node of a" and flag.exists() and not hung:
            hung.append(True)
            flag.with_name("hangs").touch()
            while not flag.with_name("released").exists():
                time.sleep(0.1)
        return batch(self, *arguments)

    Loader.batch = slow  # type: ignore[method-assign]


def stands_still(group: Group) -> bool:
    """Say whether no step ended within a second: every batch that was read ahead is used, and the step waits."""
    before = group.step()
    time.sleep(1.0)
    return group.step() == before


@pytest.mark.parametrize("waits", [False, True], ids=["reads ahead", "waits for the batch"])
def test_a_survivor_leaves_though_a_read_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    settings = prepare(tmp_path, f"data.prefetch={AHEAD}", "checkpoint.every_steps=1000")
    folder, group = Path(settings.run.uri), Group(settings, tmp_path, (1, 2), slow_shard)
    try:
        group.add("a", "b", anew=True)
        group.wait(lambda: group.step() >= 5)
        (folder / "fault").touch()
        group.wait((folder / "hangs").exists)
        if waits:
            group.wait(lambda: stands_still(group))
        group.signal("b", signal.SIGKILL)
        group.wait(lambda: group.coordinator.snapshot().generation == 1 and group.step() > 5)
        assert group.processes["a"].is_alive()
        assert group.coordinator.fenced() == set()
        finished(group)
        [failure] = group.events("failure")
        assert failure["detail"]["ranks"] == [1]
        assert "did not leave" not in failure["detail"]["error"]
        assert group.processes["a"].exitcode == 0  # the hanging thread does not prevent its exit either
    finally:
        (folder / "released").touch()
        group.end()
