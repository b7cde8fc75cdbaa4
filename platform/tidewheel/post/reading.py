"""Read a step's rollouts as texts, for people."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from tidewheel import storage
from tidewheel.errors import ShardError
from tidewheel.post import ledger
from tidewheel.post.ledger import StepEntry
from tidewheel.shards import growing
from tidewheel.shards.manifest import ROLLOUTS
from tidewheel.shards.rollouts import read_shard
from tidewheel.shards.tokenizer import Encoder, of_manifest


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
    folder = _folder(run_uri)
    if not folder.exists(growing.GROWING):
        raise ShardError("this run makes no rollouts", where=run_uri, fix="give a run whose settings have `rollouts`")
    manifest = growing.read_set(folder)
    last = len(manifest.shards)
    step = step or last
    if not 1 <= step <= last:
        raise ShardError(f"there are no rollouts of step {step}", where=folder.uri,
                         fix=f"give a step from 1 to {last}" if last else "wait for the first step")
    encoder = of_manifest(folder, manifest.tokenizer)
    rows = read_shard(folder, manifest.shards[step - 1], manifest).batch.to_pylist()
    groups: dict[str, list[Sampled]] = {}
    prompts: dict[str, str] = {}
    for row in rows:
        prompt, answer = row["tokens"][:row["prompt_length"]], row["tokens"][row["prompt_length"]:]
        prompts[row["prompt_id"]] = _text(encoder, prompt)
        pieces = tuple((_text(encoder, [token]), value if learnt else None)
                       for token, value, learnt in zip(answer, row["log_probabilities"], row["learnt"]))
        groups.setdefault(row["prompt_id"], []).append(
            Sampled(row["sample"], row["reward"], row["advantage"], _text(encoder, answer),
                    _turns(encoder, answer, row["learnt"]), pieces))
    return ledger.read(folder, step, manifest.shards[step - 1].name), [SampledGroup(name, prompts[name], tuple(answers))
                                       for name, answers in groups.items()]


def _turns(encoder: Encoder, answer: list[int], learnt: list[int]) -> tuple[tuple[str, str], ...]:
    """Return the parts of an answer, see `Sampled.turns`."""
    parts = []
    for sampled, group in itertools.groupby(zip(answer, learnt), key=lambda pair: pair[1]):
        parts.append(("policy" if sampled else "environment", _text(encoder, [token for token, _ in group])))
    return tuple(parts)


def _folder(run_uri: str) -> storage.Store:
    """Return the set of rollouts that a run trains on: its own, or for a replay that of the other run."""
    run = storage.store(run_uri)
    replayed = ""
    if run.exists("run.json"):
        replayed = (run.read_json("run.json")["config"].get("rollouts") or {}).get("replay", "")
    return (storage.store(replayed) if replayed else run).child(ROLLOUTS)


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
