"""Answers of several turns: what the policy sampled stays, what the environment wrote is not learnt, both on record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import tidewheel as tw
from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel import cli, parts, storage
from tidewheel.elastic import trainer
from tidewheel.environments.episode.base import Environment, Reply, Task
from tidewheel.errors import ConfigError, ShardError
from tidewheel.inference.conversation import TURN_BITS, Conversation
from tidewheel.post import ledger
from tidewheel.post.audit import audit_rollouts
from tidewheel.shards import growing
from tidewheel.shards.rollouts import NO_VERSION, read_shard
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
    assert "> no" in capsys.readouterr().out
    assert cli.run_command(["rollouts", "show", config.run_uri, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["groups"][0]["answers"][0]["turns"]
    assert [turn["by"] for turn in shown][:3] == ["policy", "environment", "policy"]
