"""A DPO run in real processes: a worker is killed and another joins, and the bits are those of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.in_place import ONE_SAVE, SMALL, Group, finished
from tests.unit.train.helpers import config, write_shards
from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local
from tidewheel.inference.reference import ReferenceModel, make
from tidewheel.train.config import TrainConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def prepare(folder: Path) -> TrainConfig:
    """Return the settings of a DPO run from a base model of two steps."""
    write_shards(folder / "shards")
    fit_local(config(folder, "base", *SMALL, "steps=2", "data.validation=''", "evaluation.sample_tokens=0"))
    write_pairs(folder / "pairs", random_pairs(300))
    write_pairs(folder / "held_out", random_pairs(10, seed=1))
    made = make(ReferenceModel(str(folder / "runs/base")), [str(folder / "pairs"), str(folder / "held_out")],
                str(folder / "references"))
    settings = pair_config(folder, "dpo", *SMALL, ONE_SAVE, "reproducible=true", "objective.kind=dpo",
                           f"model.init_from={folder}/runs/base", f"data.reference={made.uri}")
    limits = {"join_wait_seconds": 0.2, "resize_interval_seconds": 0.5, "heartbeat_seconds": 5.0}
    return settings.model_copy(update={"elastic": settings.elastic.model_copy(update=limits)})


def test_a_killed_and_a_new_worker_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    settings = prepare(tmp_path)
    group = Group(settings, tmp_path)
    try:
        group.add("a", "b", anew=True)
        group.wait(lambda: group.step() >= 5)
        group.signal("b", signal.SIGKILL)
        group.wait(lambda: len(group.events("recovered")) == 1)
        group.add("c")
        group.wait(lambda: len(group.events("recovered")) == 2)
        finished(group)
    finally:
        group.end()
    alone = settings.model_copy(update={"run": settings.run.model_copy(update={"id": "alone"})})
    fit_local(alone)
    assert digest(settings.run_uri) == digest(alone.run_uri)
