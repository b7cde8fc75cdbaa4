"""A small preference set, and a configuration that trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.unit.train.helpers import LENGTH, VOCABULARY, config, write_tokenizer
from tidewheel import storage
from tidewheel.shards.format import preference_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.train.config import TrainConfig

Pair = tuple[list[int], list[int], list[int]]
"""Prompt, chosen and rejected answer, as tokens."""


def random_pairs(count: int, seed: int = 0, length: int = LENGTH) -> list[Pair]:
    """Return pairs of letters: short answers are better."""
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        sizes = random.integers((2, 1, 4), (5, 4, length - 4))
        prompt, chosen, rejected = (random.integers(2, 28, size).tolist() for size in sizes)
        pairs.append((prompt, [*chosen, 0], [*rejected, 0]))
    return pairs


def write_pairs(uri: str | Path, pairs: list[Pair], *, shards: int = 2, length: int = LENGTH,
                steps: list[list[int]] | None = None, **changes: Any) -> Manifest:
    """Write a preference set of `shards` shards of about equal size, perhaps with labels of the chosen answers."""
    target = storage.store(uri)
    infos = []
    for part in np.array_split(np.arange(len(pairs)), shards):
        rows = [pairs[index] for index in part]
        more = {} if steps is None else {"step_labels": [steps[index] for index in part]}
        table = pa.table({
            "document_id": [f"pair{index}" for index in part], "prompt_length": [len(prompt) for prompt, _, _ in rows],
            "chosen": [prompt + chosen for prompt, chosen, _ in rows],
            "rejected": [prompt + rejected for prompt, _, rejected in rows], **more},
            schema=preference_schema("uint16", steps=steps is not None))
        infos.append(write_shard(target, table))
    fields: dict[str, Any] = {
        "sequence_length": length, "token_dtype": "uint16", "vocabulary_size": VOCABULARY,
        "tokenizer": write_tokenizer(target), "recipe_hash": "test", "evaluation_sets": (), "documents": len(pairs),
        "shards": tuple(infos), "kind": "preferences", "step_labels": steps is not None,
        "unpaired": steps is not None, **changes}
    manifest = Manifest(**fields)
    write_manifest(target, manifest)
    return manifest


def pair_config(folder: Path, run: str, *overrides: str) -> TrainConfig:
    """Return a configuration of 4 steps of 8 pairs over the sets in `folder`/pairs and `folder`/held_out."""
    return config(folder, run, f"data.uri={folder}/pairs", f"data.validation={folder}/held_out", "steps=4",
                  "evaluation.every_steps=2", *overrides)
