"""A worker that computes wrong bits is found and left out, and the run ends with the bits of an undisturbed one.

Real processes, without Ray.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.bit_flips import flip
from tests.cluster.in_place import ONE_SAVE, Group, finished, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.reproducible.exchange import OrderedSum
from tidewheel.train.saving import Saving
from tidewheel.train.step import SAVE

pytestmark = [pytest.mark.cluster, pytest.mark.long]

BAD = "node of c"
SETTINGS = ("guards.recomputation.share=0.2", "parallel.data=ddp", "checkpoint.keep_last=100",
            "batch.virtual_ranks=6", "batch.global_sequences=12", "batch.micro_sequences=2", "elastic.max_workers=3",
            "steps=90", "checkpoint.memory_tier.every_steps=0")


def wrong_bits(node: str, flag: Path) -> None:
    """Save every second step, and flip a bit of each gradient on one node once `flag` exists."""
    add, ask, rng = OrderedSum.add, Saving.ask, random.Random(3)

    def wrong(self: OrderedSum, *flats: Any) -> None:
        if node == BAD and flag.exists():
            flip(flats[0], rng, 20)
        add(self, *flats)

    def asks(self: Saving, step: int) -> int:
        return ask(self, step) | SAVE * (self._training.leads and step % 2 == 0)

    OrderedSum.add, Saving.ask = wrong, asks  # type: ignore[method-assign]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    settings = prepare(tmp_path, ONE_SAVE, *SETTINGS, readmit_after_seconds=600.0)
    group = Group(settings, tmp_path, (1, 2, 3), wrong_bits)
    group.add("a", "b", "c", anew=True)
    group.wait(lambda: group.step() >= 12)
    Path(settings.run.uri, "fault").touch()
    yield group
    group.end()


def test_wrong_bits_are_found_and_undone(group: Group, tmp_path: Path):
    group.wait(lambda: group.events("worker_left_out") != [])
    finished(group)
    [found] = [event["detail"] for event in group.events("corruption")]
    [out] = [event["detail"] for event in group.events("worker_left_out")]
    assert (out["node"], out["level"]) == (BAD, "node")
    assert "SilentCorruptionError" in out["reason"]
    [bad] = found["ranks"]
    assert found["found"][0]["place"] == "gradient"
    assert found["found"][0]["certain"] is True
    assert found["nodes"] == [BAD[:12]]
    [failure] = group.events("failure")
    assert failure["detail"]["ranks"] == [bad]
    [resumed] = [event["detail"] for event in group.events("resume")]
    assert resumed["step"] <= found["back_to"] == found["since"] - 1
    assert resumed["world_size"] == 2
    suspect = [info for info in list_checkpoints(group.store.child("checkpoints")) if info.suspect]
    assert all(found["back_to"] < info.step <= found["step"] and not info.complete for info in suspect)
    still = config(tmp_path, "still", *[change for change in SETTINGS if "recomputation" not in change],
                   "model.num_layers=1", "evaluation.every_steps=0", "reproducible=true")
    fit_local(still)
    assert digest(group.settings.run_uri).state == digest(still.run_uri).state
