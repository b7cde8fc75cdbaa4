"""Tests of runs whose engine cannot repeat rollouts: stored before a step has them, used again, audited by hash."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.post.runs import InlinePool, ScriptedPool, logged, rollout_run
from tests.unit.post.test_collector import answered, waves
from tests.unit.post.test_episodes import GUESS, Script
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic import trainer
from tidewheel.engines.serving.base import Completion, Prefix, RunningEngine
from tidewheel.errors import RolloutError, ShardError, StorageAwayError
from tidewheel.inference.group import Sampling, sample_group
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.post import ledger, stored
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.collector import Collector, head_of, open_set
from tidewheel.post.converse import converse, problem_of
from tidewheel.post.fetching import Fetched
from tidewheel.post.groups import Group, Job
from tidewheel.post.ledger import Policy
from tidewheel.post.policy import Version
from tidewheel.post.prompts import Prompt
from tidewheel.post.recorded import RecordedCollector
from tidewheel.post.replay import replayed
from tidewheel.post.running import Prepared, prepare
from tidewheel.shards.growing import read_set
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.run import Run

STAND_IN = f"rollouts.engine={{kind: 'tests.engine_parts:StandIn', python: '{sys.executable}'"


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[InlinePool]:
    """Let generators work in this process; return their pools."""
    made: list[InlinePool] = []

    def pool(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> InlinePool:
        made.append(InlinePool(arguments))
        return made[-1]

    monkeypatch.setattr(trainer, "_local_pool", pool)
    return made


def test_a_killed_engine_costs_a_group_that_is_sampled_anew(tmp_path: Path, pools: list[InlinePool]):
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "kill").touch()
    config = rollout_run(tmp_path, "run", f"{STAND_IN}, faults: '{faults}'}}", "steps=2", "objective.correction=masked")
    trainer.fit_local(config)
    assert not list(faults.iterdir()), "the process was killed while it sampled"
    gaps = [record["objective"]["gap"] for record in logged(tmp_path, "run", "metrics.jsonl") if "objective" in record]
    assert len(gaps) == 2
    assert min(gaps) > 0, "the tokens of the stand-in are equally likely, those of the policy are not"
    steps = [record for record in logged(tmp_path, "run", "rollouts.jsonl") if record["kind"] == "step"]
    assert [(record["engine"], record["engine_losses"]) for record in steps] == [("stand-in 1", 1), ("stand-in 1", 0)]
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    assert (proof.ok, proof.stored, proof.again, proof.admitted) == (True, 16, 1, 16)
    assert "all 16 groups have the hash in the ledger; 1 were lost" in proof.summary()
    whole = audit(config.run_uri)
    assert whole.ok, whole.summary()
    folder = storage.store(config.data.uri or f"{config.run_uri}/rollouts")
    assert not folder.list("stored"), "steps have all of them"
    assert not folder.list("begun")
    _check_that_tampering_is_found(config)
    trainer.fit_local(again := replayed(config.run_uri, f"{tmp_path}/runs/again"))
    assert digest(again.run_uri).groups["model"] == digest(config.run_uri).groups["model"]


def _check_that_tampering_is_found(config: TrainConfig) -> None:
    folder = storage.store(f"{config.run_uri}/rollouts")
    name = read_set(folder).shards[1].name
    entry = ledger.read(folder, 2, name)
    for tampered, said in ((replace(entry, rollouts=(entry.rollouts[1], *entry.rollouts[1:])), "another hash"),
                           (replace(entry, rollouts=()), "the hashes of 0 groups"),
                           (replace(entry, again=(999,)), "was not admitted"),
                           (replace(entry, engine="other"), "another engine")):
        ledger.write(folder, tampered)
        proof = audit_rollouts(config.run_uri)
        assert proof is not None
        assert any(said in line for line in proof.mismatches), (said, proof.mismatches)
    ledger.write(folder, entry)


def test_an_engine_that_always_dies_ends_the_run_with_its_reason(tmp_path: Path, pools: list[InlinePool],
                                                                 monkeypatch: pytest.MonkeyPatch):
    from tidewheel.engines.serving.process import ProcessRunning

    def dies(self: ProcessRunning, prefixes: Sequence[Prefix]) -> Sequence[Completion]:
        raise self._lost("it was killed")

    monkeypatch.setattr(ProcessRunning, "complete", dies)
    with pytest.raises(ShardError, match=r"groups of step 1 failed.*because: lost: .*it was killed"):
        trainer.fit_local(rollout_run(tmp_path, "run", STAND_IN + "}", "rollouts.generators.most_tries=1"))


def test_an_engine_of_ones_own_samples(tmp_path: Path, pools: list[InlinePool]):
    """It says that it repeats rollouts, so they are kept as the native engine's are."""
    config = rollout_run(tmp_path, "run", "rollouts.engine={kind: 'tests.engine_parts:Dice', seed: 3}", "steps=1",
                         GUESS, "rollouts.answer_tokens=11")
    trainer.fit_local(config)
    proof = audit_rollouts(config.run_uri)
    assert proof is not None
    assert proof.ok, proof.summary()
    assert "made again with the same bits" in proof.summary()
    assert config.own_parts()["rollouts.engine"].name == "tests.engine_parts:Dice"


# -- a driver that takes over --------------------------------------------------------------------
class Ended(Exception):
    """The driver is killed."""


class DyingPool(ScriptedPool):
    """Ends the driver before it returns the group with a number."""

    def __init__(self, answer: Callable[[Job], Group], dies_at: int) -> None:
        super().__init__(answer)
        self._left = dies_at
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        super().submit(job)

    def next(self, seconds: float) -> Group | None:
        if self._left == 0:
            raise Ended
        self._left -= 1
        return super().next(seconds)


def marked(job: Job) -> Group:
    return replace(answered(job), again=job.again)


def collected(folder: Path, pool: DyingPool, *overrides: str) -> TrainConfig:
    """Collect the rollouts of a run whose policy is published for every step, with an engine that cannot repeat."""
    opened = Run.open(rollout_run(folder, "run", "batch.global_sequences=16", "batch.micro_sequences=4", "steps=2",
                                  STAND_IN + "}", *overrides))
    prepared = prepare(opened)
    assert isinstance(prepared, Prepared)
    config = opened.config
    assert config.rollouts is not None
    for step in range(config.steps):
        opened.store.write_json(f"policies/{step:08d}.0of1.json", {
            "format": 1, "version": step, "file": "0" * 32 + ".safetensors", "bytes": 1, "hash": "blake3-" + "0" * 64})
    known = open_set(storage.store(config.data.uri), head_of(config, prepared.prompts, prepared.tokenizer,
                                                             prepared.vocabulary_size))
    made = Collector if config.rollouts.schedule == "in_order" else RecordedCollector
    made(config, prepared.prompts, known, pool, on_step=lambda *_: None, ended=threading.Event()).collect()
    return config


@pytest.mark.parametrize("schedule", ["in_order", "recorded"])
@pytest.mark.parametrize("dies_at", [0, 1, 3, 6])
def test_a_driver_uses_what_was_stored_and_says_what_was_not(tmp_path: Path, schedule: str, dies_at: int):
    overrides = (f"rollouts.schedule={schedule}", f"rollouts.look_ahead={int(schedule == 'recorded')}")
    before, after = DyingPool(marked, dies_at), DyingPool(marked, -1)
    with pytest.raises(Ended):
        collected(tmp_path, before, *overrides)
    folder = storage.store(f"{tmp_path}/runs/run/rollouts")
    done = dies_at - 4 * len(read_set(folder).shards) if dies_at else 0
    assert len(folder.list("stored")) == done
    config = collected(tmp_path, after, *overrides)
    given, stored_before = {job.position for job in before.jobs}, dies_at
    again = [job.position for job in after.jobs if job.again]
    assert len(again) == len(given) - stored_before, "each that was begun and not stored"
    assert {job.position for job in after.jobs if job.position in given} == set(again)
    _, entries = waves(config)
    admitted = [position for entry in entries for position in entry.admitted]
    assert sorted(admitted) == list(range(8)), "nothing is skipped or doubled"
    assert sorted(position for entry in entries for position in entry.again) == sorted(again)
    assert all(len(entry.rollouts) == 4 for entry in entries)
    assert not folder.list("stored")


def test_no_step_has_what_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, events = rollout_run(tmp_path, "run", STAND_IN + "}"), []
    folder = storage.store(tmp_path / "set")
    group = replace(answered(Job(3, Prompt("p", "a", None, (1,)), Version(2, ()))), again=True, engine="stand-in 1",
                    fetched=Fetched(1, 2, 3, 0.5), referred=([-1.0, -2.0],) * 4)
    kept = stored.Stored(folder, config)
    write = storage.LocalStore.write

    def away(*arguments: Any) -> Any:
        events.append(arguments)
        if len(events) == 1:
            raise StorageAwayError("the store does not answer", where="s3://x", fix="wait until it is back")
        return write(*arguments)

    monkeypatch.setattr(storage.LocalStore, "write", away)
    kept.add(group, Policy(2, "digest"))
    assert not folder.list("stored")
    kept.flush()
    [file] = folder.list("stored")
    [(found, policy)] = stored.Stored(folder, config).load().values()
    assert (found, policy) == (group, Policy(2, "digest"))
    assert (found.again, found.engine, found.fetched) == (True, "stand-in 1", Fetched(1, 2, 3, 0.5))
    assert stored.hash_of(found) == stored.hash_of(group)
    assert stored.Stored(folder, rollout_run(tmp_path, "run", STAND_IN + "}", "rollouts.seed=9")).load() == {}
    data = folder.read(file.key)
    folder.write(file.key, data.replace(b"stand-in", b"Stand-in"))
    assert stored.Stored(folder, config).load() == {}
    assert not folder.list("stored"), "what is damaged is sampled again"


# -- conversations -------------------------------------------------------------------------------
class Greedy(RunningEngine):
    """Takes the most likely token, computed from the whole sequence."""

    def __init__(self, model: Decoder, stop: frozenset[int]) -> None:
        self._model, self._stop = model, stop

    @torch.no_grad()
    def complete(self, prefixes: Sequence[Prefix]) -> list[Completion]:
        completions = []
        for prefix in prefixes:
            tokens, values = list(prefix.tokens), []
            while len(values) < prefix.most and not (values and tokens[-1] in self._stop):
                row = torch.tensor([tokens])
                logits = self._model(row, torch.arange(len(tokens))[None], torch.zeros_like(row))[0, -1].log_softmax(-1)
                tokens.append(int(logits.argmax()))
                values.append(float(logits.max()))
            completions.append(Completion(tokens[len(prefix.tokens):], values))
        return completions


@pytest.mark.parametrize("replies", [None, [(5, 6), (), None], [(5,) * 30], [None]])
def test_an_engine_talks_as_the_native_one_does(replies: list[Sequence[int] | None] | None):
    torch.manual_seed(0)
    model = Decoder(families.KIND.build("llama", {"dim": 16, "num_layers": 2, "num_heads": 2,
                                                  "max_sequence_length": 40}), 16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    model.requires_grad_(False)
    for stop in (frozenset[int](), frozenset({7, 3}), frozenset(range(0, 16, 2))):
        sampling = Sampling(20, temperature=0, stop=stop)
        partners = [None, None] if replies is None else [Script(*replies, opening=(4,), turn_tokens=5) for _ in "ab"]
        native = sample_group(model, [1, 2], [0], sampling, key=1, stream=2, partner=partners[0])
        other = converse(Greedy(model, stop), [1, 2], [0], sampling, key=1, stream=2, room=38, vocabulary_size=16,
                         partner=partners[1])
        for ours, theirs in zip(native, other, strict=True):
            assert (ours.tokens, ours.written, ours.stopped, ours.begin) == (
                theirs.tokens, theirs.written, theirs.stopped, theirs.begin)
            assert theirs.log_probabilities == pytest.approx(ours.log_probabilities, abs=1e-4)


@pytest.mark.parametrize(("tokens", "values", "said"), [
    ([], [], "0 tokens"), ([1] * 5, [-1.0] * 5, "5 tokens"), ([1, 16], [-1.0] * 2, "vocabulary"),
    ([1, True], [-1.0] * 2, "vocabulary"), ([1, 2], [-1.0], "1 log-prob"), ([1], [float("nan")], "finite"),
    ([1] * 4, [0.5] * 4, "above 0"), ([0, 1], [-1.0] * 2, "behind a stop"), ([1, 2], [-1.0] * 2, "no stop token"),
    ([1, 2, 0], [-1.0] * 3, ""), ([1] * 4, [-1.0] * 4, "")])
def test_what_an_engine_returns_is_checked(tokens: list[int], values: list[float], said: str):
    problem = problem_of(Completion(tokens, values), Prefix([1], 4, 0), frozenset({0}), 16)
    assert (said in problem) if said else problem == ""


def test_a_wrong_completion_ends_the_run(tmp_path: Path, pools: list[InlinePool]):
    (tmp_path / "wrong").touch()
    with pytest.raises((RolloutError, ShardError), match="a completion is not one"):
        trainer.fit_local(rollout_run(tmp_path, "run", f"{STAND_IN}, faults: '{tmp_path}'}}"))
