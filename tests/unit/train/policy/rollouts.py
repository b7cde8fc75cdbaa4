"""A small set of rollouts, and a configuration that trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.unit.train.helpers import LENGTH, VOCABULARY, config, write_tokenizer
from tidewheel import storage
from tidewheel.shards.format import rollout_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.train.config import TrainConfig


@dataclass(frozen=True)
class Rollout:
    """One row of a set of rollouts."""

    prompt: list[int]
    answer: list[int]
    log_probabilities: list[float]
    advantage: float
    reference: tuple[float, ...] = ()
    learnt: tuple[int, ...] = ()
    """Empty: the policy sampled every token of the answer."""
    advantages: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()


def random_rollouts(count: int, seed: int = 0, length: int = LENGTH) -> list[Rollout]:
    """Return rollouts of letters in groups of four, with the log-probabilities of an imagined policy."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        if index % 4 == 0:
            prompt = random.integers(2, 28, random.integers(2, 6)).tolist()
        answer = random.integers(2, 28, random.integers(1, length - 6)).tolist()
        rows.append(Rollout(prompt, answer, random.uniform(-4, -2, len(answer)).tolist(), float(random.normal())))
    return rows


def table_of(rows: Sequence[Rollout]) -> pa.Table:
    """Return the columns of a shard of rollouts."""
    return pa.table({
        "prompt_id": [f"prompt{index // 4}" for index in range(len(rows))],
        "sample": [index % 4 for index in range(len(rows))],
        "prompt_length": [len(row.prompt) for row in rows], "tokens": [row.prompt + row.answer for row in rows],
        "learnt": [list(row.learnt) or [1] * len(row.answer) for row in rows],
        "log_probabilities": [row.log_probabilities for row in rows],
        "versions": [[0] * len(row.answer) for row in rows], "reference": [list(row.reference) for row in rows],
        "reward": [max(0.0, row.advantage) for row in rows], "advantage": [row.advantage for row in rows],
        **{name: [list(getattr(row, name)) for row in rows] for name in ("advantages", "values", "returns")}},
        schema=rollout_schema("uint16"))


def write_rollouts(uri: str | Path, rows: Sequence[Rollout], *, shards: int = 2, length: int = LENGTH,
                   **changes: Any) -> Manifest:
    """Write a set of rollouts of `shards` shards of about equal size."""
    target, table = storage.store(uri), table_of(rows)
    infos = [write_shard(target, table.slice(part[0], len(part)))
             for part in np.array_split(np.arange(len(rows)), shards)]
    fields: dict[str, Any] = {
        "sequence_length": length, "token_dtype": "uint16", "vocabulary_size": VOCABULARY,
        "tokenizer": write_tokenizer(target), "recipe_hash": "test", "evaluation_sets": (), "documents": len(rows) // 4,
        "shards": tuple(infos), "kind": "rollouts", **changes}
    manifest = Manifest(**fields)
    write_manifest(target, manifest)
    return manifest


def rollout_config(folder: Path, run: str, *overrides: str) -> TrainConfig:
    """Return a configuration of 4 steps over the set in `folder`/rollouts."""
    return config(folder, run, f"data.uri={folder}/rollouts", "data.validation=", "objective.kind=grpo", "steps=4",
                  *overrides)
