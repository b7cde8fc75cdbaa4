"""Tests of what a step takes from the order of the prompts, whatever order its groups are done in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.post.runs import ScriptedPool, rollout_run
from tidewheel import storage
from tidewheel.errors import InputError, OwnershipError, RolloutError
from tidewheel.inference.group import Answer
from tidewheel.post import kept, ledger, policy
from tidewheel.post.advantages import advantages
from tidewheel.post.collector import Collector, head_of, open_set
from tidewheel.post.fetching import Fetcher
from tidewheel.post.groups import Group, Job
from tidewheel.post.ledger import Dropped
from tidewheel.post.running import Prepared, prepare
from tidewheel.shards.growing import Growing, read_set
from tidewheel.train.config import TrainConfig
from tidewheel.train.run import Run


def answered(job: Job, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0)) -> Group:
    answers = tuple(Answer([2 + job.position % 20, sample], [-1.0, -0.5], True) for sample in range(len(rewards)))
    return Group(job.position, job.prompt.id, job.version.number, answers, rewards)


def collect(folder: Path, answer: Callable[[Job], Group], *overrides: str, run: str = "run", seed: int = 0
            ) -> tuple[TrainConfig, ScriptedPool]:
    """Collect the rollouts of a run whose policy is published for every step."""
    opened = Run.open(rollout_run(folder, run, "batch.global_sequences=16", "batch.micro_sequences=4", *overrides))
    prepared = prepare(opened)
    assert isinstance(prepared, Prepared)
    config, pool = opened.config, ScriptedPool(answer, seed)
    for step in range(config.steps):
        opened.store.write_json(f"policies/{step:08d}.0of1.json", {
            "format": 1, "version": step, "file": "0" * 32 + ".safetensors", "bytes": 1, "hash": "blake3-" + "0" * 64})
    known = open_set(storage.store(config.data.uri), head_of(
        config, prepared.prompts, prepared.tokenizer, prepared.vocabulary_size))
    Collector(config, prepared.prompts, known, pool, on_step=lambda *_: None, ended=threading.Event()).collect()
    return config, pool


def waves(config: TrainConfig) -> tuple[list[str], list[ledger.StepEntry]]:
    folder = storage.store(config.data.uri)
    names = [shard.name for shard in read_set(folder).shards]
    return names, [ledger.read(folder, step, name) for step, name in enumerate(names, start=1)]


def some_fail(job: Job) -> Group:
    if job.position in (1, 9):
        return Group(job.position, job.prompt.id, job.version.number, failure="reward: raised")
    return answered(job)


def test_the_order_of_completion_does_not_matter(tmp_path: Path):
    outcomes = [waves(collect(tmp_path, some_fail, run=f"run{seed}", seed=seed)[0]) for seed in range(4)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    _, entries = outcomes[0]
    assert [entry.admitted for entry in entries] == [(0, 2, 3, 4), (5, 6, 7, 8), (10, 11, 12, 13), (14, 15, 16, 17)]
    assert [group.position for entry in entries for group in entry.dropped] == [1, 9]
    assert all(group.reason == "reward: raised" for entry in entries for group in entry.dropped)


def test_groups_without_a_difference_are_resampled(tmp_path: Path):
    def alike(job: Job) -> Group:
        return answered(job, (1.0,) * 4) if job.position % 3 == 0 else answered(job)

    config, pool = collect(tmp_path, alike, "rollouts.resample=true", "steps=2")
    _, entries = waves(config)
    assert [entry.admitted for entry in entries] == [(1, 2, 4, 5), (7, 8, 10, 11)]
    assert entries[0].dropped == tuple(Dropped(position, f"p{_row(config, position)}", "equal rewards")
                                       for position in (0, 3))
    assert sorted(pool.submitted) == list(range(12)), "no group is sampled for nothing"


def _row(config: TrainConfig, position: int) -> str:
    prepared = prepare(Run.open(config))
    assert prepared is not None
    return prepared.prompts.at(position).id.removeprefix("p")


def test_a_collector_continues_behind_the_last_wave(tmp_path: Path):
    whole = waves(collect(tmp_path, some_fail, run="whole")[0])

    def ends(job: Job) -> Group:
        if job.version.number == 2:
            raise KeyboardInterrupt
        return some_fail(job)

    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, ends, run="ended")
    folder = storage.store(tmp_path / "runs" / "ended" / "rollouts")
    ledger.write(folder, whole[1][3])  # a killed collector may leave an entry whose wave is not there
    config, pool = collect(tmp_path, some_fail, run="ended")
    assert waves(config) == whole
    assert min(pool.submitted) == 9, "what is written is not sampled again"


def test_groups_that_were_done_are_not_sampled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "KEEP_SECONDS", 0.0)
    whole = waves(collect(tmp_path, some_fail, run="whole")[0])
    done: list[int] = []

    def ends(job: Job) -> Group:
        if job.version.number == 2 and len(done) == 10:
            raise KeyboardInterrupt
        done.append(job.position)
        return some_fail(job)

    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, ends, run="ended")
    config, pool = collect(tmp_path, some_fail, run="ended")
    assert waves(config) == whole
    assert set(done) & set(pool.submitted) <= {9}, "only what has failed"
    assert not storage.store(config.data.uri).list("done")


def test_two_drivers_cannot_mix_their_waves(tmp_path: Path):
    whole = waves(collect(tmp_path, some_fail, "steps=2")[0])

    def other(job: Job) -> Group:
        return answered(job, (0.0, 1.0, 0.0, 0.0))

    run = Run.open(rollout_run(tmp_path, "run", "batch.global_sequences=16", "batch.micro_sequences=4", "steps=2"))
    config, prepared = run.config, prepare(run)
    assert prepared is not None
    head = head_of(config, prepared.prompts, prepared.tokenizer, prepared.vocabulary_size)
    late = Collector(config, prepared.prompts, Growing.of(head), ScriptedPool(other), on_step=lambda *_: None,
                     ended=threading.Event())
    with pytest.raises(OwnershipError, match="another writer has published this wave"):
        late.collect()
    assert waves(config) == whole


def test_a_step_that_drops_too_much_ends_the_run(tmp_path: Path):
    with pytest.raises(RolloutError, match="2 of 2 groups of step 1 failed"):
        collect(tmp_path, lambda job: Group(job.position, job.prompt.id, 0, failure="lost"), run="failing")
    with pytest.raises(RolloutError, match="33 groups of step 1 were sampled for the 4"):
        collect(tmp_path, lambda job: answered(job, (0.0,) * 4), "rollouts.resample=true", run="alike")


def test_other_prompts_are_refused(tmp_path: Path):
    config, _ = collect(tmp_path, some_fail)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('\n{"prompt": "new"}')
    with pytest.raises(RolloutError, match="begun with other prompts"):
        prepare(Run.open(config))


BAD = [
    ('{"prompt": "a"', "line 1 is not JSON"), ('{"text": "a"}', 'line 1 has no text under "prompt"'),
    ('{"prompt": "a", "answer": "b"}', "unknown key 'answer', allowed are prompt"),
    ('{"prompt": "a"}\n{"prompt": "a"}', "line 2 has the id .* of an earlier line"),
    ('{"prompt": "abcdefghijklmnop"}', "line 1 has 16 tokens, allowed are 1 to 11"),
    ('{"prompt": "a", "reference": [1]}', "neither text nor a number"), ("\n", "the file has no prompt")]


def test_bad_prompts_are_named(tmp_path: Path):
    config = rollout_run(tmp_path)
    for text, message in BAD:
        (tmp_path / "prompts.jsonl").write_text(text)
        with pytest.raises(InputError, match=message):
            prepare(Run.open(config))


def test_a_changed_version_of_the_policy_is_refused(tmp_path: Path):
    config, _ = collect(tmp_path, some_fail, "steps=1")
    run = storage.store(config.run_uri)
    version = policy.published(run, 0, 1)
    assert version is not None
    assert policy.published(run, 1, 1) is None
    assert policy.published(run, 0, 2) is None
    run.write(version.files[0].whole.key, b"x")
    with pytest.raises(Exception, match="the weights have changed"):
        Fetcher(run).fetch(version)


def test_advantages_follow_their_formulas():
    rewards = np.random.default_rng(0).normal(size=(3, 4))
    mean, deviation = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
    others = (rewards.sum(1, keepdims=True) - rewards) / 3
    expected = {"group": (rewards - mean) / (deviation + 1e-4), "group_mean": rewards - mean,
                "leave_one_out": rewards - others, "reward": rewards}
    for kind, values in expected.items():
        assert np.allclose(advantages(rewards.tolist(), kind), values), kind
