"""Read a step's rollouts as texts, for people."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.post import ledger
from tidewheel.post.ledger import StepEntry
from tidewheel.shards import growing
from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.shards.rollouts import read_shard
from tidewheel.shards.tokenizer import Encoder, of_manifest
from tidewheel.train.record import positions, recorded_source
from tidewheel.train.rollout_batch import rollout_batch


@dataclass(frozen=True)
class Sampled:
    """One answer. Texts come from a model: escape them before showing them."""

    sample: int
    reward: float
    advantage: float
    text: str
    turns: tuple[tuple[str, str], ...]
    """The text in parts: ("policy", what it wrote) or ("environment", what was replied)."""
    pieces: tuple[tuple[str, float | None], ...]
    """Each token as text, with its log-probability when it was sampled; None for the environment's."""


@dataclass(frozen=True)
class SampledGroup:
    """The answers to one prompt."""

    prompt_id: str
    prompt: str
    answers: tuple[Sampled, ...]

    @property
    def reward(self) -> float:
        """Return the mean reward."""
        return sum(answer.reward for answer in self.answers) / len(self.answers)


def step_rollouts(run_uri: str, step: int = 0) -> tuple[StepEntry, list[SampledGroup]]:
    """Return the groups that a step trains on.

    Args:
        run_uri: the run's folder.
        step: the step; 0: the newest one with rollouts.

    Raises:
        ShardError: the run has no rollouts, or none for this step.
    """
    folder, rollouts = _set_of(run_uri)
    if not folder.exists(growing.GROWING):
        raise ShardError("this run makes no rollouts", where=run_uri, fix="give a run whose settings have `rollouts`")
    manifest = growing.read_set(folder)
    minibatches = rollouts.get("minibatches", 1)
    steps = rollouts.get("epochs", 1) * minibatches  # of a wave
    last = len(manifest.shards) * steps
    step = step or last
    if not 1 <= step <= last:
        raise ShardError(f"there are no rollouts of step {step}", where=folder.uri,
                         fix=f"give a step from 1 to {last}" if last else "wait for the first step")
    wave = (step - 1) // steps
    encoder = of_manifest(folder, manifest.tokenizer)
    rows = read_shard(folder, manifest.shards[wave], manifest).batch.to_pylist()
    groups: list[tuple[str, str, list[Sampled]]] = []  # a wave may have several of one prompt
    for row in rows:
        prompt, answer = row["tokens"][:row["prompt_length"]], row["tokens"][row["prompt_length"]:]
        if row["sample"] == 0:
            groups.append((row["prompt_id"], _text(encoder, prompt), []))
        pieces = tuple((_text(encoder, [token]), value if learnt else None)
                       for token, value, learnt in zip(answer, row["log_probabilities"], row["learnt"]))
        groups[-1][2].append(
            Sampled(row["sample"], row["reward"], row["advantage"], _text(encoder, answer),
                    _turns(encoder, answer, row["learnt"]), pieces))
    found = [SampledGroup(name, prompt, tuple(answers)) for name, prompt, answers in groups]
    if minibatches > 1:
        found = [found[place] for place in _places(run_uri, step)]
    return ledger.read(folder, wave * steps + 1, manifest.shards[wave].name), found


def _places(run_uri: str, step: int) -> list[int]:
    """Return the places of a step's groups in its wave."""
    run = storage.store(run_uri).read_json("run.json")
    source = recorded_source(run)
    batch = rollout_batch(source, positions(run, source).of(step), run["config"]["rollouts"]["group"])
    places: list[int] = batch["groups"]
    return places


def _turns(encoder: Encoder, answer: list[int], learnt: list[int]) -> tuple[tuple[str, str], ...]:
    """Return the parts of an answer, see `Sampled.turns`."""
    parts = []
    for sampled, group in itertools.groupby(zip(answer, learnt), key=lambda pair: pair[1]):
        parts.append(("policy" if sampled else "environment", _text(encoder, [token for token, _ in group])))
    return tuple(parts)


def _set_of(run_uri: str) -> tuple[storage.Store, dict[str, Any]]:
    """Return the set of rollouts that a run trains on, for a replay that of the other run, and its settings."""
    run = storage.store(run_uri)
    settings: dict[str, Any] = {}
    if run.exists("run.json"):
        settings = run.read_json("run.json")["config"].get("rollouts") or {}
    replayed = settings.get("replay", "")
    return (storage.store(replayed) if replayed else run).child(ROLLOUTS), settings


def _text(encoder: Encoder, tokens: list[int]) -> str:
    """Return the text of tokens, with the names of special ones."""
    names = {number: name for name, number in encoder.special.items()}
    parts: list[str] = []
    plain: list[int] = []
    for token in [*tokens, -1]:
        if token in names or token == -1:
            parts.append(encoder.decode(np.array([value for value in plain if value < encoder.vocabulary_size])))
            plain = []
            parts.append(names.get(token, ""))
        else:
            plain.append(token)
    return "".join(parts)
