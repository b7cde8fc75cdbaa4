"""Tests of the schedule `recorded`: what a step admits, what the ledger says of it, and what a replay makes of it."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.post.runs import InlinePool, ScriptedPool, inline, rollout_run
from tests.unit.post.test_collector import answered, waves
from tidewheel import cli, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.errors import ConfigError
from tidewheel.post import kept, ledger
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.collector import head_of, open_set
from tidewheel.post.fetching import Fetched
from tidewheel.post.groups import Group, Job
from tidewheel.post.ledger import Policy, StepEntry
from tidewheel.post.policy import Version
from tidewheel.post.prompts import Prompt
from tidewheel.post.recorded import RecordedCollector, admissible
from tidewheel.post.replay import replayed
from tidewheel.post.running import prepare
from tidewheel.train.config import TrainConfig
from tidewheel.train.run import Run
from tidewheel.train.starts import record_start

STEPS, GROUPS = 12, 4


class Killed(Exception):
    """The driver has ended."""


def two_fail(job: Job) -> Group:
    if job.position in (1, 40):
        return Group(job.position, job.prompt.id, job.version.number, failure="reward: raised")
    return answered(job)


class TrainerAndPool(ScriptedPool):
    """A pool of groups that are done in any order, and a trainer that publishes a version now and then.

    Args:
        run: the run's folder.
        config: its settings.
        seed: of the orders.
        kill_at: step at whose first group the driver is killed; 0: never.
    """

    def __init__(self, run: storage.Store, config: TrainConfig, seed: int, kill_at: int = 0) -> None:
        super().__init__(two_fail, seed)
        self._run, self._config, self._kill_at = run, config, kill_at
        self._trained = self._collected = -1
        self.done_in_step = 0
        self.done: set[int] = set()
        self.most_out = 0
        self.publish()

    def publish(self) -> None:
        """Train the next step and publish the policy after it."""
        self._trained += 1
        self._run.write_json(f"policies/{self._trained:08d}.0of1.json", {
            "format": 1, "version": self._trained, "file": f"{self._trained:032x}.safetensors", "bytes": 1,
            "hash": f"blake3-{self._trained:064x}"})

    def next(self, seconds: float) -> Group | None:
        collected = len(list(self._run.list("rollouts/waves")))
        if self._kill_at and collected + 1 == self._kill_at and self.done_in_step == 3:
            raise Killed
        self.done_in_step = 1 if collected != self._collected else self.done_in_step + 1
        self._collected = collected
        if self._trained < collected and self._random.random() < 0.3:
            self.publish()
        self.most_out = max(self.most_out, len(self._jobs))
        group = super().next(seconds)
        assert group is not None
        self.done.add(group.position)
        return group


class TrainsMeanwhile(threading.Event):
    """The end of the work. Who waits for it gives the trainer time for a step.

    Args:
        pool: publishes the policy.
    """

    def __init__(self, pool: TrainerAndPool) -> None:
        super().__init__()
        self._pool = pool

    def wait(self, timeout: float | None = None) -> bool:
        self._pool.publish()
        return self.is_set()


def collect(folder: Path, run: str, seed: int, look_ahead: int, kill_at: int = 0,
            pools: list[TrainerAndPool] | None = None) -> tuple[TrainConfig, TrainerAndPool]:
    """Collect the rollouts of a recorded run; a killed driver leaves what it has written."""
    opened = Run.open(rollout_run(folder, run, "batch.global_sequences=16", "batch.micro_sequences=4", f"steps={STEPS}",
                                  "rollouts.schedule=recorded", f"rollouts.look_ahead={look_ahead}"))
    config, prepared = opened.config, prepare(opened)
    assert prepared is not None
    if not opened.store.exists("run.json"):
        opened.store.write_json("run.json", {"config": config.canonical()})
    pool = TrainerAndPool(opened.store, config, seed, kill_at)
    if pools is not None:
        pools.append(pool)
    head = head_of(config, prepared.prompts, prepared.tokenizer, prepared.vocabulary_size)
    collector = RecordedCollector(config, prepared.prompts, open_set(storage.store(config.data.uri), head), pool,
                                  on_step=lambda *_: None, ended=TrainsMeanwhile(pool))
    collector._poll = 1e-6
    collector.collect()
    return config, pool


def test_every_group_is_admitted_once_within_the_bound_of_the_lag(tmp_path: Path):
    for seed in range(3):
        config, pool = collect(tmp_path, f"run{seed}", seed, look_ahead=seed)
        result = audit_rollouts(config.run_uri)
        assert result is not None
        assert result.ok, result.summary()
        assert result.admitted == STEPS * GROUPS
        assert result.most_lag <= seed
        assert pool.submitted == list(range(STEPS * GROUPS + 2)), "two failed; no group is sampled for nothing"
        assert pool.most_out <= (1 + seed) * GROUPS
    _, entries = waves(config)
    assert any(list(entry.admitted) != sorted(entry.admitted) for entry in entries), "in the order of their end"
    assert any(len(entry.policies) > 1 for entry in entries)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_killed_driver_loses_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float):
    monkeypatch.setattr(kept, "KEEP_SECONDS", seconds)
    for kill_at in (1, 7, 12):
        pools: list[TrainerAndPool] = []
        with pytest.raises(Killed):
            collect(tmp_path, f"run{kill_at}", 1, 2, kill_at, pools)
        written = waves(Run.open(rollout_run(tmp_path, f"run{kill_at}")).config)
        taken = {position for entry in written[1] for position in (
            *entry.admitted, *(group.position for group in entry.dropped))}
        config, pool = collect(tmp_path, f"run{kill_at}", 2, 2)
        assert taken.isdisjoint(pool.submitted), "what a step has is not sampled again"
        if not seconds:
            assert (pools[0].done - {1, 40}).isdisjoint(pool.submitted), "nor what was done besides"
        assert not storage.store(config.data.uri).list("done")
        result = audit_rollouts(config.run_uri)
        assert result is not None
        assert result.ok, result.summary()
        assert waves(config)[1][:kill_at - 1] == written[1]


def test_the_audit_finds_what_is_wrong(tmp_path: Path):
    config, _ = collect(tmp_path, "run", 3, 2)
    folder = storage.store(config.data.uri)
    _, entries = waves(config)
    entry = next(entry for entry in entries if entry.open and 0 < entry.policies[0].version < entry.step - 1)
    first, *others = entry.policies
    wrongs: dict[str, StepEntry] = {
        "is neither admitted nor dropped, or both": replace(entry, open=entry.open[1:]),
        "is not whole": replace(entry, admitted=(*entry.admitted[1:], entry.admitted[0])),
        "allowed are": replace(entry, policies=(replace(first, version=entry.step), *others)),
        "another version of the policy": replace(entry, policies=(replace(first, version=first.version + 1), *others)),
    }
    for message, wrong in wrongs.items():
        ledger.write(folder, wrong)
        result = audit_rollouts(config.run_uri)
        assert result is not None
        assert message in result.summary(), message
    ledger.write(folder, entry)
    result = audit_rollouts(config.run_uri)
    assert result is not None
    assert result.ok


def test_a_step_leaves_room_for_groups_at_their_last_chance():
    chosen = random.Random(0)
    for _ in range(300):
        needed, span = chosen.randint(1, 4), chosen.randint(1, 3)
        deadlines: list[int] = []
        for deadline in range(span):  # as many as places up to each deadline, at most
            room = (deadline + 1) * needed - len(deadlines)
            deadlines += [deadline] * chosen.randint(0, room)
        chosen.shuffle(deadlines)
        done = chosen.randint(0, len(deadlines))
        ready, out = list(enumerate(deadlines[:done])), deadlines[done:]
        admitted = admissible(ready, out, 0, needed)
        assert len(admitted) <= needed
        left = [*out, *(deadline for position, deadline in ready if position not in admitted)]
        unused = needed - len(admitted)
        for step in range(span):
            assert sum(deadline <= step for deadline in left) <= unused + step * needed
        passed = [position for position, _ in ready if position not in admitted]
        if unused and passed:  # each place left is needed by an older group that is still out
            last = max(deadlines[position] for position in passed)
            assert any(deadline < last for deadline in out)


def test_what_a_driver_has_kept_serves_only_its_own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "KEEP_SECONDS", 0.0)
    folder, config = storage.store(tmp_path), rollout_run(tmp_path)
    job = Job(3, Prompt("p", "a", None, (1,)), Version(2, ()))
    group, policy = replace(answered(job), seconds=0.25, fetched=Fetched(1, 2, 3, 0.1)), Policy(2, "digest")
    before = kept.Kept(folder, config)
    before.add(group, policy)
    [entry] = folder.list("done")
    assert kept.Kept(folder, config).load() == {3: (group, policy)}
    assert kept.Kept(folder, rollout_run(tmp_path, "run", "rollouts.temperature=0.5",
                                         "objective.temperature=0.5")).load() == {}
    folder.write(entry.key, folder.read(entry.key).replace(b"digest", b"Digest"))
    assert kept.Kept(folder, config).load() == {}
    assert not folder.list("done")


def no_generator(*_: Any) -> Any:
    raise AssertionError("a replay has started a generator")


@pytest.mark.parametrize("schedule", [pytest.param("in_order", marks=pytest.mark.long), "recorded"])
def test_a_replay_has_the_same_parameters_without_a_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture, schedule: str):
    shuffled = random.Random(5)

    class AnyOrder(InlinePool):
        def next(self, seconds: float) -> Group | None:
            shuffled.shuffle(self._jobs)
            return super().next(seconds)

    monkeypatch.setattr(trainer, "_local_pool", lambda arguments, *_: AnyOrder(arguments))
    config = rollout_run(tmp_path, "run", f"rollouts.schedule={schedule}", "rollouts.look_ahead=1")
    trainer.fit_local(config)
    monkeypatch.setattr(trainer, "_local_pool", no_generator)
    (tmp_path / "prompts.jsonl").rename(tmp_path / "gone.jsonl")  # a replay needs no prompts
    assert cli.run_command(["rollouts", "replay", config.run_uri, "--to", f"{tmp_path}/again", "--local"]) == 0
    assert "the same as those of" in capsys.readouterr().out
    assert digest(f"{tmp_path}/again").state == digest(config.run_uri).state
    assert not (tmp_path / "again/policies").exists()
    (tmp_path / "gone.jsonl").rename(tmp_path / "prompts.jsonl")
    for command in (["audit"], ["rollouts", "show"]):
        assert cli.run_command([*command, f"{tmp_path}/again"]) == 0
    assert "every prompt was admitted or dropped by name once" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "_local_pool", inline)
    config = rollout_run(tmp_path, "run", "steps=2")
    trainer.fit_local(config)
    for overrides, message in (["steps=3"], "rollouts of 2 steps, and the replay has 3"), (["run.id=run"], "itself"):
        settings = replayed(config.run_uri, f"{tmp_path}/runs/again", overrides)
        with pytest.raises(ConfigError, match=message):
            prepare(Run.open(settings))
    run = storage.store(config.run_uri)
    with pytest.raises(ConfigError, match=r"rollouts\.schedule was in_order, now recorded"):
        record_start(run, rollout_run(tmp_path, "run", "steps=2", "rollouts.schedule=recorded"), 2)
    record_start(run, rollout_run(tmp_path, "run", "steps=2", "optimizer.learning_rate=1"), 2)
    with pytest.raises(ConfigError, match=r"another optimizer\.learning_rate"):
        replayed(config.run_uri, f"{tmp_path}/again")
