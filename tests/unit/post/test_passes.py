"""Tests of runs that train on each wave of rollouts in several passes and steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.elastic.test_torchrun import KILLER, _torchrun
from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.errors import ConfigError
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.reading import step_rollouts
from tidewheel.post.replay import replayed
from tidewheel.stopping import Stop, Stopped
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig

PASSES = ("rollouts.epochs=2", "rollouts.minibatches=2", "rollouts.look_ahead=1", "steps=12",
          "checkpoint.every_steps=1")


@pytest.fixture(autouse=True)
def inline_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_local_pool", inline)


def stopped_at(folder: Path, run: str, step: int, *settings: str) -> TrainConfig:
    """Train until a step and return the run's settings."""
    stop = Stop()

    def on_progress(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= step:
            stop.requested.set()

    config = rollout_run(folder, run, *settings)
    with pytest.raises(Stopped):
        trainer.fit_local(config, on_progress=on_progress, stop=stop)
    return config


def test_a_wave_is_trained_on_in_passes_and_a_run_stopped_amid_it_has_the_same_bits(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "whole", *PASSES))
    config = stopped_at(tmp_path, "stopped", 6, *PASSES)  # in the second of four steps of wave 2
    trainer.fit_local(config)
    whole, stopped = (digest(f"{tmp_path}/runs/{run}").groups["model"] for run in ("whole", "stopped"))
    assert whole == stopped
    assert audit(config.run_uri).ok
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    assert proof.ok, proof.summary()
    assert (proof.steps, proof.admitted, proof.most_lag) == (12, 3 * 16, 4)
    assert "in 2 passes" in proof.summary()

    records = {record["step"]: record for record in logged(tmp_path, "stopped", "batches.jsonl")}
    assert [(records[step]["wave"], records[step]["epoch"]) for step in range(1, 13)] == [
        (wave, epoch) for wave in (1, 2, 3) for epoch in (1, 2) for _ in range(2)]
    passes = [[*records[step]["groups"], *records[step + 1]["groups"]] for step in range(1, 13, 2)]
    assert all(sorted(groups) == list(range(16)) for groups in passes)
    assert len({tuple(groups) for groups in passes}) == 6, "each pass has another order"

    steps = [record["objective"] for record in logged(tmp_path, "whole", "metrics.jsonl") if "objective" in record]
    assert steps[0]["gap"] == 0, "the first step trains the policy that sampled"
    assert all(step["gap"] > 0 for step in steps[1:])
    assert max(step["clipped"] for step in steps) > 0
    assert max(abs(step["ratio"] - 1) for step in steps) > 1e-3
    versions = sorted(path.name[:8] for path in (tmp_path / "runs/whole/policies").glob("*.json"))
    assert versions == ["00000000", "00000004"], "only the policies between waves are published"
    entry, groups = step_rollouts(config.run_uri, 7)
    assert (entry.step, entry.version, entry.lags) == (5, 0, [4] * 16)
    assert len(groups) == 8, "those of one step"

    again = replayed(config.run_uri, f"{tmp_path}/runs/again")
    trainer.fit_local(again)
    assert digest(f"{tmp_path}/runs/again").groups["model"] == whole


@pytest.mark.long
def test_a_replay_that_is_killed_amid_a_wave_goes_on_with_another_number_of_ranks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two ranks train on a run's rollouts until one gets SIGKILL in the second wave; one rank goes on."""
    trainer.fit_local(rollout_run(tmp_path, "whole", *PASSES))
    again = replayed(f"{tmp_path}/runs/whole", f"{tmp_path}/runs/again")
    (tmp_path / "killer.py").write_text(KILLER)
    monkeypatch.syspath_prepend(tmp_path)  # the audit builds the run's callbacks
    killed = _torchrun(tmp_path, again, f"callbacks=[{{kind: 'killer:KillRank', once: '{tmp_path / 'once'}'}}]")
    assert killed.returncode == 1
    assert (tmp_path / "once").exists(), killed.stderr
    trainer.fit_local(again)
    assert digest(f"{tmp_path}/runs/again").groups["model"] == digest(f"{tmp_path}/runs/whole").groups["model"]
    sizes = {record["step"]: record["world_size"] for record in logged(tmp_path, "again", "batches.jsonl")}
    assert (sizes[4], sizes[8]) == (2, 1)
    proof = audit_rollouts(f"{tmp_path}/runs/again")
    assert proof is not None
    assert proof.ok, proof.summary()


def test_a_recorded_run_counts_the_lag_in_waves(tmp_path: Path):
    config = rollout_run(tmp_path, "run", *PASSES, "rollouts.schedule=recorded", "rollouts.look_ahead=2")
    trainer.fit_local(config)
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    assert proof.ok, proof.summary()
    entries = [step_rollouts(config.run_uri, step)[0] for step in (1, 5, 9)]
    assert [(entry.epochs, entry.minibatches, len(entry.admitted)) for entry in entries] == [(2, 2, 16)] * 3
    assert {version for entry in entries for version in entry.versions} <= {0, 4, 8}


def damaged(folder: Path, step: int, **changes: Any) -> tuple[str, ...]:
    """Change the record of a step, and return what the audit says."""
    store = storage.store(folder / "runs/run")
    for entry in store.list():
        if not entry.key.startswith("batches.jsonl"):
            continue
        lines = [json.loads(line) for line in store.read(entry.key).splitlines()]
        lines = [{**line, **changes} if line["step"] == step else line for line in lines]
        store.write(entry.key, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    proof = audit_rollouts(f"{folder}/runs/run")
    assert proof is not None
    return proof.mismatches


def test_an_audit_notices_a_group_that_a_pass_has_twice_or_not_at_all(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "run", *PASSES[:2], "steps=4"))
    [groups] = [record["groups"] for record in logged(tmp_path, "run", "batches.jsonl") if record["step"] == 2]
    assert not damaged(tmp_path, 2)
    [line] = damaged(tmp_path, 2, groups=groups[1:])
    assert line == f"pass 1 over wave 1 has group {groups[0]} 0 times, planned is once"
    [line] = damaged(tmp_path, 2, groups=[*groups, groups[0]])
    assert line == f"pass 1 over wave 1 has group {groups[0]} 2 times, planned is once"
    assert any("step 2 trained on wave 1 in pass 2, planned are 1 and 1" in line
               for line in damaged(tmp_path, 2, groups=groups, epoch=2))


@pytest.mark.parametrize(("settings", "message"), [
    (("rollouts.epochs=3",), "nearest legal choice: 3"),
    (("rollouts.epochs=2", "objective.correction=truncated"), "nothing would be clipped"),
    (("rollouts.epoch=2",), "epochs")])
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        rollout_run(tmp_path, "run", *settings)


def test_a_run_cannot_go_on_with_other_passes(tmp_path: Path):
    stopped_at(tmp_path, "run", 1, *PASSES[:2], "steps=4")
    with pytest.raises(ConfigError, match=r"rollouts\.epochs was 2, now 1"):
        trainer.fit_local(rollout_run(tmp_path, "run", PASSES[1], "steps=4"))
