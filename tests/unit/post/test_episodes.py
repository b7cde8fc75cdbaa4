"""Answers of several turns: what the policy sampled stays, what the environment wrote is not learnt, both on record."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.unit.post.runs import InlinePool, inline, logged, rollout_run
from tidewheel import cli, parts, storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.environments.episode.base import Environment, Reply, Task
from tidewheel.errors import ConfigError, ShardError
from tidewheel.inference.conversation import TURN_BITS, Conversation
from tidewheel.models.decoder import IGNORED
from tidewheel.post import ledger
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.groups import Group
from tidewheel.post.pool import LocalPool
from tidewheel.shards import growing
from tidewheel.shards.rollouts import NO_VERSION, RolloutSet, read_shard
from tidewheel.train.batches import micro_batch
from tidewheel.train.config import TrainConfig

GUESS = "rollouts.environment={kind: guess_number, turn_tokens: 2, turns: 3, turn_end: '', none: 'no ', highest: 1}"


@pytest.fixture(autouse=True)
def inline_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_local_pool", inline)


def game(folder: Path, run: str = "run", *overrides: str) -> TrainConfig:
    """Return a run of the guessing game, whose letters are rewarded as in `rollout_run`."""
    return rollout_run(folder, run, GUESS, "rollouts.answer_tokens=11", *overrides)


def rows_of(config: TrainConfig, step: int = 1) -> tuple[ledger.StepEntry, list[dict[str, Any]]]:
    folder = storage.store(f"{config.run_uri}/rollouts")
    manifest = growing.read_set(folder)
    info = manifest.shards[step - 1]
    return ledger.read(folder, step, info.name), read_shard(folder, info, manifest).batch.to_pylist()


class Script:
    """A partner that replies as a test says."""

    def __init__(self, *replies: Sequence[int] | None, opening: Sequence[int] = (), turn_tokens: int = 0) -> None:
        self._replies, self._opening, self.turn_tokens = list(replies), opening, turn_tokens
        self.turns: list[list[int]] = []

    def opening(self, answer: int) -> Sequence[int]:
        return self._opening

    def ends(self, turn: Sequence[int]) -> bool:
        return turn[-1] == 8

    def reply(self, answer: int, turn: Sequence[int]) -> Sequence[int] | None:
        self.turns.append(list(turn))
        return self._replies.pop(0)


def played(partner: Script, *sampled: int, most: int = 20) -> tuple[Conversation, list[int]]:
    """Return a conversation in which the policy samples these tokens, and the places that their draws had."""
    talk, places, left = Conversation(0, {9}, most, partner), [], list(sampled)
    while not talk.over:
        if talk.next_written is not None:
            talk.write()
        else:
            places.append(talk.place)
            talk.add(left.pop(0), -1.0)
    assert not left
    return talk, places


def test_a_conversation_keeps_turns_apart():
    script = Script([50, 51], [], None, opening=[40])
    talk, places = played(script, 1, 9, 2, 8, 3, 4, 9)
    assert talk.tokens == [40, 1, 9, 50, 51, 2, 8, 3, 4, 9]
    assert talk.written == {0, 3, 4}
    assert talk.values == [0, -1, -1, 0, 0, -1, -1, -1, -1, -1]
    assert script.turns == [[1], [2, 8], [3, 4]], "the stop token is no part of the text"
    assert places == [0, 1, *((1 << TURN_BITS) + i for i in range(2)), *((2 << TURN_BITS) + i for i in range(3))]
    assert (talk.stopped, talk.begin) == (True, 7)


@pytest.mark.parametrize(("most", "tokens", "turns"), [
    (5, [1, 9, 50, 51, 2], 1),  # cut in the second turn, which nobody takes
    (4, [1, 9], 1),             # a reply that leaves no room for a turn is left out
    (2, [1, 9], 1)])
def test_a_limit_on_tokens_ends_with_a_sampled_token(most: int, tokens: list[int], turns: int):
    script = Script([50, 51], None)
    talk, _ = played(script, *[token for token in tokens if token < 50], most=most)
    assert talk.tokens == tokens
    assert len(script.turns) == turns
    assert not talk.stopped


def test_a_limit_on_the_tokens_of_a_turn_ends_it():
    script = Script([50], None, turn_tokens=2)
    assert played(script, 1, 2, 3, 4)[0].tokens == [1, 2, 50, 3, 4]


def test_a_run_of_several_turns_learns_what_was_sampled_and_has_no_gap(tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]):
    config = game(tmp_path, "run", "steps=6")
    trainer.fit_local(config)
    metrics = [record["objective"] for record in logged(tmp_path, "run", "metrics.jsonl") if "objective" in record]
    assert [record["gap"] for record in metrics] == [0] * 6, "not one bit differs, also behind replies"
    entry, rows = rows_of(config, 6)
    assert entry.environment == config.rollouts.environment.key()
    assert {len({*row["learnt"]}) for row in rows} == {2}, "every answer has replies"
    for row in rows:
        learnt, values = np.array(row["learnt"]), np.array(row["log_probabilities"])
        assert learnt[-1] == 1
        assert (values[learnt == 0] == 0).all()
        assert (values[learnt == 1] < 0).all()
        assert [version == NO_VERSION for version in row["versions"]] == (learnt == 0).tolist()
    proof = audit_rollouts(config.run_uri)
    assert proof.ok, proof.summary()
    assert cli.run_command(["rollouts", "show", config.run_uri]) == 0
    assert "> n o" in capsys.readouterr().out
    assert cli.run_command(["rollouts", "show", config.run_uri, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["groups"][0]["answers"][0]["turns"]
    assert [turn["by"] for turn in shown][:3] == ["policy", "environment", "policy"]


def test_training_gets_the_tokens_that_were_sampled_and_learns_no_others(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch):
    groups: list[Group] = []

    class Watched(InlinePool):
        def next(self, seconds: float) -> Group | None:
            groups.append(super().next(seconds))
            return groups[-1]

    monkeypatch.setattr(trainer, "_local_pool", lambda arguments, config, on_event: Watched(arguments))
    config = game(tmp_path, "run", "steps=1")
    trainer.fit_local(config)
    answers = [answer for group in sorted(groups, key=lambda group: group.position) for answer in group.answers]
    uri = f"{config.run_uri}/rollouts"
    rollouts = RolloutSet.open(uri, manifest=growing.read_set(storage.store(uri)))
    read = rollouts.rows(np.zeros(32, np.int64), np.arange(32))
    batch = micro_batch(read, slice(None), 0, torch.device("cpu"))
    for row, answer in enumerate(answers):
        begin = int(read.lengths[row]) - len(answer.tokens)
        assert batch.tokens[row, begin:begin + len(answer.tokens)].tolist() == answer.tokens
        targets = batch.targets[row, begin - 1:begin - 1 + len(answer.tokens)].tolist()
        assert targets == [IGNORED if index in answer.written else token for index, token in enumerate(answer.tokens)]
        assert (batch.targets[row, :begin - 1] == IGNORED).all()
    assert batch.num_targets == sum(sum(answer.learnt) for answer in answers)


def test_audit_finds_a_reply_that_the_environment_did_not_give(tmp_path: Path):
    config = game(tmp_path, "run", "steps=1")
    trainer.fit_local(config)
    path = tmp_path / "runs/run/run.json"
    values = json.loads(path.read_text())
    values["config"]["rollouts"]["environment"]["none"] = "yes "
    path.write_text(json.dumps(values))
    assert "another one than the ledger says" in audit_rollouts(config.run_uri).mismatches[0]
    [entry_path] = (tmp_path / "runs/run/rollouts/steps").glob("*.json")
    entry = json.loads(entry_path.read_text())
    environment = TrainConfig.model_validate({**values["config"], "data": {}}).rollouts.environment
    entry_path.write_text(json.dumps({**entry, "environment": environment.key()}))
    proof = audit_rollouts(config.run_uri)
    assert len(proof.mismatches) == 32
    assert "the environment now replies with another token 2" in proof.mismatches[0]


OWN = '''
import tidewheel as tw


class Own(tw.Environment):
    """Fail when asked; else a reward a turn, which depends on the seed and the sample."""
    broken: str = ""
    turn_tokens: int = 3

    def reset(self, task):
        return {"task": task, "turns": 0}, "go " * (20 if self.broken == "long" else 1)

    def step(self, state, text):
        state["turns"] += 1
        if self.broken == "raise":
            raise RuntimeError("no tool")
        if self.broken == "tell":
            return tw.Reply(failure="away")
        if self.broken == "type":
            return text
        reward = float("nan") if self.broken == "nan" else 0.1 * (state["task"].seed % 7 + state["task"].sample)
        return tw.Reply("a", reward=reward, done=state["turns"] == 2)


def judge(sample):
    return float(len(sample.answer))
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with an environment and a reward in the working folder."""
    name = "games_" + "".join(letter if letter.isalnum() else "_" for letter in tmp_path.name)
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    forget(name)


def forget(name: str) -> None:
    sys.modules.pop(name, None)
    parts._load.cache_clear()
    parts._source_hash.cache_clear()


def of_own(folder: Path, own: str, broken: str = "") -> TrainConfig:
    """Return a run with the module's environment, and no reward beside it."""
    values = rollout_run(folder, "run", "steps=1", "rollouts.answer_tokens=12").canonical()
    environment = {"kind": f"{own}:Own", **({"broken": broken} if broken else {})}
    return TrainConfig.model_validate({**values, "rollouts": {
        **values["rollouts"], "reward": None, "environment": environment}})


def test_rewards_of_turns_add_up_and_follow_from_the_seed(tmp_path: Path, own: str):
    config = of_own(tmp_path, own)
    trainer.fit_local(config)
    entry, rows = rows_of(config)
    assert len({row["reward"] - 0.2 * row["sample"] for row in rows}) > 1, "prompts have seeds of their own"
    for group in range(8):
        rewards = [row["reward"] for row in rows[4 * group:4 * group + 4]]
        assert np.allclose(np.diff(rewards), 0.2), "answers to a prompt share a seed; two turns of 0.1 a sample"
    assert all(row["learnt"][0] == 0 for row in rows), "the opening is the environment's"
    assert (entry.reward, len(entry.environment)) == ("", 16)
    assert audit_rollouts(config.run_uri).ok


@pytest.mark.parametrize(("broken", "reason"), [
    ("raise", "environment: raised: RuntimeError: no tool"), ("tell", "environment: away"),
    ("nan", "environment: not_finite"), ("long", "environment: no_room"), ("type", "step returned str")])
def test_a_failure_of_the_environment_is_never_a_reward(tmp_path: Path, own: str, broken: str, reason: str):
    with pytest.raises(ShardError, match=reason):
        trainer.fit_local(of_own(tmp_path, own, broken))


def test_the_ledger_has_the_hash_of_the_source_that_judged(tmp_path: Path, own: str):
    def trained(run: str, steps: int = 1) -> ledger.StepEntry:
        config = rollout_run(tmp_path, run, f"steps={steps}", f"rollouts.reward={{kind: '{own}:judge'}}")
        trainer.fit_local(config)
        return rows_of(config)[0]

    first, again = trained("first"), trained("again")
    assert len(first.reward) == 16
    assert first.reward == again.reward
    path = tmp_path / f"{own}.py"
    path.write_text(path.read_text().replace("len(sample.answer)", "-len(sample.answer)"))
    forget(own)
    assert trained("changed").reward != first.reward
    with pytest.raises(ConfigError, match=r"rollouts\.reward\.code was"):
        trained("first", steps=2)


class Chance(Environment):
    """Replies by chance."""

    DETERMINISTIC: ClassVar[bool] = False

    def reset(self, task: Task) -> tuple[None, str]:
        return None, ""

    def step(self, state: None, text: str) -> Reply:
        return Reply(done=True)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path):
    values = rollout_run(tmp_path).canonical()
    with pytest.raises(ValueError, match="what judges the answers"):
        TrainConfig.model_validate({**values, "rollouts": {**values["rollouts"], "reward": None}})
    rollouts = {**values["rollouts"], "environment": Chance()}
    with pytest.raises(ValueError, match="nearest legal choice: reproducible false"):
        TrainConfig.model_validate({**values, "rollouts": rollouts})
    assert TrainConfig.model_validate({**values, "reproducible": False, "rollouts": rollouts})


@pytest.mark.long
def test_a_killed_generator_makes_the_same_turns_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer.fit_local(game(tmp_path, "whole"))
    pools: list[LocalPool] = []

    def pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> LocalPool:
        pools.append(LocalPool(arguments, config.rollouts.generators, on_event))
        return pools[0]

    monkeypatch.setattr(trainer, "_local_pool", pool)
    killed = threading.Event()

    def kill(progress: dict[str, Any]) -> None:
        if progress.get("step", 0) >= 1 and not killed.is_set():
            killed.set()
            os.kill(next(iter(pools[0]._executor._processes)), signal.SIGKILL)

    trainer.fit_local(game(tmp_path, "killed", "rollouts.generators.processes=2"), on_progress=kill)
    assert killed.is_set()
    assert digest(f"{tmp_path}/runs/killed").state == digest(f"{tmp_path}/runs/whole").state
    assert audit_rollouts(f"{tmp_path}/runs/killed").ok
