"""Tests of a generator in the process that trains: the same bits as apart, and no memory between its turns."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.errors import ConfigError
from tidewheel.post.colocated import ColocatedPool
from tidewheel.post.groups import Group
from tidewheel.shards import notices
from tidewheel.train.audit import audit
from tidewheel.train.policy import resident

COLOCATED = "rollouts.generators.colocated=true"


def live_bytes() -> int:
    """Return the bytes of all tensors in memory that are alive, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            try:
                storages[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:
                continue  # a fake tensor that another test has left has no memory
    return sum(storages.values())


def test_a_turn_shares_the_trainers_weights_and_gives_its_memory_back(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    config = rollout_run(tmp_path, "run", COLOCATED, "steps=2", "model.dim=128", "model.ffn_dim=256",
                         "checkpoint.every_steps=100")
    turns: list[dict[str, int]] = []
    shared: list[bool] = []
    next_group = ColocatedPool.next

    def measured(self: ColocatedPool, seconds: float) -> Group | None:
        is_first = not self._ahead and self._generator is not None  # of the second turn: all is imported
        if is_first:
            turns.append({"before": live_bytes()})
        group = next_group(self, seconds)
        if is_first and self._generator is not None:
            turns[-1]["during"] = live_bytes()
            [(_, tensors)] = resident._held.values()
            trained = {value.data_ptr() for value in tensors.values()}
            shared.append(all(value.data_ptr() in trained for value in self._generator._model.parameters()))
        if not self._jobs and turns:
            turns[-1]["after"] = live_bytes()
        return group

    monkeypatch.setattr(ColocatedPool, "next", measured)
    trainer.fit_local(config)
    assert shared == [True], "the generator has no weights of its own"
    [turn] = turns
    weights = 4 * config.model.parameters(128)
    assert weights // 2 < turn["during"] - turn["before"] < 2 * weights, "prepared weights live as long as a turn"
    assert turn["after"] - turn["before"] < weights // 20, "neither weights nor keys stay"


def test_a_colocated_run_has_the_bits_of_one_with_a_generator_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer.fit_local(rollout_run(tmp_path, "together", COLOCATED))
    monkeypatch.setattr(trainer, "_local_pool", inline)
    trainer.fit_local(rollout_run(tmp_path, "apart"))
    together, apart = (digest(f"{tmp_path}/runs/{run}").groups["model"] for run in ("together", "apart"))
    assert together == apart
    assert audit(f"{tmp_path}/runs/together").ok
    steps = [record for record in logged(tmp_path, "together", "metrics.jsonl") if "objective" in record]
    assert all(record["objective"]["gap"] == 0 for record in steps)
    fetched = [record["fetched"] for record in logged(tmp_path, "together", "rollouts.jsonl")
               if record["kind"] == "step"]
    assert all(record["whole"] == record["deltas"] == 0 for record in fetched), "no weights were read"


def test_what_cannot_take_turns_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="look_ahead is 0"):
        rollout_run(tmp_path, "run", COLOCATED, "rollouts.look_ahead=1")
    with pytest.raises(ConfigError, match="no other processes"):
        rollout_run(tmp_path, "run", COLOCATED, "rollouts.generators.processes=2")
    with pytest.raises(ConfigError, match="one process only"):
        trainer._ray_pool((), rollout_run(tmp_path, "run", COLOCATED), lambda *_, **__: None)


def test_a_reader_that_is_told_does_not_wait():
    before = notices.told("here")
    notices.tell("here")
    with notices.promised("here"):
        notices.wait("here", 1e6, before)
    notices.wait("here", 0.0, notices.told("here"))
