"""Tests of whole runs of reinforcement learning: they learn, and their bits depend on no process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.errors import ShardError, StorageAwayError
from tidewheel.post import fetching, ledger, policy, waiting
from tidewheel.post.pool import LocalPool
from tidewheel.shards import growing
from tidewheel.stopping import Stop, Stopped
from tidewheel.train import growth
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig


@pytest.fixture(autouse=True)
def inline_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_local_pool", inline)


def parameters(folder: Path, run: str) -> str:
    return digest(f"{folder}/runs/{run}").groups["model"]


def test_a_policy_learns_and_its_generator_computes_what_training_does(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "run", "steps=12"))
    steps = [record for record in logged(tmp_path, "run", "metrics.jsonl") if "objective" in record]
    rewards = [record["reward"] for record in logged(tmp_path, "run", "rollouts.jsonl") if record["kind"] == "step"]
    assert len(steps) == len(rewards) == 12
    assert all(record["objective"]["gap"] == 0 for record in steps), "not one bit differs"
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert [path.name for path in sorted((tmp_path / "runs/run/policies").glob("*.json"))] == ["00000011.0of1.json"]
    result = audit(f"{tmp_path}/runs/run")
    assert result.ok, result.summary()
    assert result.sequences == 12 * 32


def test_a_run_that_is_stopped_and_continued_has_the_same_bits(tmp_path: Path):
    trainer.fit_local(rollout_run(tmp_path, "whole"))
    stop = Stop()

    def after_two(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= 2:
            stop.requested.set()

    with pytest.raises(Stopped):
        trainer.fit_local(rollout_run(tmp_path, "stopped"), on_progress=after_two, stop=stop)
    trainer.fit_local(rollout_run(tmp_path, "stopped"))
    assert parameters(tmp_path, "stopped") == parameters(tmp_path, "whole")
    assert audit(f"{tmp_path}/runs/stopped").ok


@pytest.mark.long
def test_killed_generators_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer.fit_local(rollout_run(tmp_path, "whole"))
    pools: list[LocalPool] = []

    def pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> LocalPool:
        assert config.rollouts is not None
        pools.append(LocalPool(arguments, config.rollouts.generators, on_event))
        return pools[0]

    monkeypatch.setattr(trainer, "_local_pool", pool)
    killed = threading.Event()

    def kill(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= 1 and not killed.is_set():
            killed.set()
            [process] = pools[0]._executor._processes.values()
            os.kill(process.pid, signal.SIGKILL)

    trainer.fit_local(rollout_run(tmp_path, "killed"), on_progress=kill)
    assert killed.is_set()
    assert [record["kind"] for record in logged(tmp_path, "killed", "rollouts.jsonl")].count("generator_lost") >= 1
    assert parameters(tmp_path, "killed") == parameters(tmp_path, "whole")


def test_a_failing_reward_ends_the_run_with_its_reason(tmp_path: Path):
    with pytest.raises(ShardError, match=r"groups of step 1 failed.*reward: no_reference"):
        trainer.fit_local(rollout_run(tmp_path, "run", "rollouts.reward={kind: exact_match}"))


def test_rollouts_wait_for_storage_that_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The generator, the collector, its look for a policy and the trainer's look for a wave meet an outage each."""
    def once(module: Any, name: str) -> None:
        function = getattr(module, name)
        calls: list[int] = []

        def flaky(*arguments: Any, **named: Any) -> Any:
            calls.append(0)
            if len(calls) == 2:
                away.append(name)
                raise StorageAwayError("the store does not answer", where="s3://x", fix="wait until it is back")
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, flaky)

    trainer.fit_local(rollout_run(tmp_path, "whole", "steps=2"))
    away: list[str] = []
    monkeypatch.setattr(waiting, "PAUSE_SECONDS", 0.01)
    once(fetching.Fetcher, "fetch")
    once(policy, "published")
    once(growing, "publish")
    once(growth.Growth, "_check_writer")
    trainer.fit_local(rollout_run(tmp_path, "outages", "steps=2"))
    assert sorted(away) == ["_check_writer", "fetch", "publish", "published"]
    assert parameters(tmp_path, "outages") == parameters(tmp_path, "whole")


def test_what_storage_does_not_give_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def away(*_: Any) -> Any:
        raise StorageAwayError("the store does not answer", where="s3://x", fix="wait until it is back")

    monkeypatch.setattr(storage.LocalStore, "read_json", away)
    with pytest.raises(StorageAwayError):
        policy.published(storage.store(tmp_path), 0, 1)
    with pytest.raises(StorageAwayError):
        ledger.read(storage.store(tmp_path), 1, "0" * 64)


def test_patience_with_storage_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "PAUSE_SECONDS", 0.01)
    config = rollout_run(tmp_path, "run", "checkpoint.max_failed_saves=1", "checkpoint.retry_seconds=0.05")
    tries: list[int] = []

    def away() -> None:
        tries.append(0)
        raise StorageAwayError("the store does not answer", where="s3://x", fix="wait until it is back")

    with pytest.raises(StorageAwayError):
        waiting.patiently(away, config)
    assert len(tries) > 1
    ended = threading.Event()
    ended.set()
    with pytest.raises(StorageAwayError):
        waiting.patiently(away, rollout_run(tmp_path, "run", "checkpoint.max_failed_saves=0"), ended)
