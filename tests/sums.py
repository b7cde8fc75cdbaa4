"""A small arithmetic task: a model reads sums of which half are wrong, then learns right ones by reinforcement.

The text, the prompts and the shard set are the same for the same arguments, and need no Ray.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewheel import storage
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.shards.format import shard_schema, write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.train.config import TrainConfig

CHARACTERS = "0123456789+="
VOCABULARY, EOS, PAD = 128, 0, 1
LENGTH = 64
"""Tokens of a sequence of the base model's text."""
HELD_OUT = 20
MODEL = {"dim": 64, "num_layers": 2, "num_heads": 4, "tie_embeddings": True, "max_sequence_length": LENGTH}


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text: one for each character."""
    return [2 + CHARACTERS.index(character) for character in text]


def write_sums(folder: Path, *, right: float = 0.5, unjudged: int = 0, seed: int = 0) -> None:
    """Write `text/`, a shard set of 6,000 sums, and `prompts.jsonl`, `held_out.jsonl` and `tokenizer.json`.

    Args:
        folder: takes them.
        right: share of the text's sums that are right; in the others the total is random.
        unjudged: prompts whose reference is blank, so that their reward fails.
        seed: of the text, and of which sums are held out of the prompts.
    """
    chance = random.Random(seed)
    sums = [(a, b) for a in range(10) for b in range(10)]
    texts = []
    for number in range(6000):
        a, b = sums[number % len(sums)]
        total = a + b if chance.random() < right else chance.randrange(19)
        texts.append(f"{a}+{b}={total}")
    chance.shuffle(texts)
    _write_text(folder / "text", texts)
    chance.shuffle(sums)
    lines = [{"prompt": f"{a}+{b}=", "reference": str(a + b), "id": f"{a}+{b}"} for a, b in sums]
    held_out, prompts = lines[:HELD_OUT], lines[HELD_OUT:]
    for line in prompts[:unjudged]:
        line["reference"] = " "
    for name, part in (("prompts", prompts), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)) + "\n")
    (folder / "tokenizer.json").write_bytes((folder / "text/tokenizer.json").read_bytes())


def _write_text(folder: Path, texts: list[str]) -> None:
    """Write a shard set of texts, whole ones in each sequence."""
    from tokenizers import Tokenizer, models

    target = storage.store(folder)
    vocabulary = {"<|endoftext|>": EOS, "<|pad|>": PAD, **{text: 2 + at for at, text in enumerate(CHARACTERS)}}
    stamp = target.write("tokenizer.json", Tokenizer(models.BPE(vocab=vocabulary, merges=[])).to_str().encode())
    rows: list[list[int]] = [[]]
    starts: list[list[int]] = [[]]
    ids: list[list[str]] = [[]]
    for number, text in enumerate(texts):
        tokens = [*token_ids(text), EOS]
        if len(rows[-1]) + len(tokens) > LENGTH:
            rows.append([])
            starts.append([])
            ids.append([])
        starts[-1].append(len(rows[-1]))
        ids[-1].append(f"sum{number}")
        rows[-1] += tokens
    padded = np.full((len(rows), LENGTH), PAD, dtype=np.uint16)
    for row, tokens in enumerate(rows):
        padded[row, :len(tokens)] = tokens
    schema = shard_schema(LENGTH, "uint16")
    columns = [pa.FixedSizeListArray.from_arrays(pa.array(padded.ravel()), LENGTH), pa.array(map(len, rows)),
               pa.array(starts), pa.array(ids), pa.array([[0] * len(row) for row in starts])]
    table = pa.table([column.cast(field.type) for column, field in zip(columns, schema)], schema=schema)
    tokenizer: dict[str, object] = {"file": "tokenizer.json", "hash": stamp.hash, "eos": EOS, "pad": PAD}
    write_manifest(target, Manifest(
        sequence_length=LENGTH, token_dtype="uint16", vocabulary_size=VOCABULARY, tokenizer=tokenizer,
        recipe_hash="sums", evaluation_sets=(), documents=len(texts), shards=(write_shard(target, table),)))


def train_base(folder: Path, steps: int, *, seed: int = 0) -> str:
    """Train the base model on the text in `folder` in this process, and return its run's URI.

    Args:
        folder: see `write_sums`.
        steps: of 32 sequences.
        seed: of the initial values and of the order of the text.
    """
    config = build(TrainConfig, {
        "run": {"id": f"base-{seed}", "uri": str(folder / "runs")}, "seed": seed,
        "data": {"uri": str(folder / "text"), "seed": seed}, "model": MODEL, "steps": steps,
        "optimizer": {"learning_rate": 3e-3}, "schedule": {"warmup_steps": 20},
        "batch": {"global_sequences": 32, "micro_sequences": 16, "virtual_ranks": 2},
        "evaluation": {"sample_tokens": 0}, "checkpoint": {"every_steps": steps}})
    fit_local(config)
    return config.run_uri


def sums_run(folder: Path, run: str, base: str, steps: int, *overrides: str) -> TrainConfig:
    """Return a run of GRPO on the prompts in `folder`: 8 groups of 4 answers a step, right ones are rewarded.

    Args:
        folder: see `write_sums`.
        run: name of the run.
        base: URI of the model that it starts from.
        steps: of the run.
        overrides: settings, such as "rollouts.look_ahead=1".
    """
    return build(TrainConfig, {
        "run": {"id": run, "uri": str(folder / "runs")}, "steps": steps, "reproducible": True,
        "model": {**MODEL, "attention": "exact", "init_from": base}, "objective": {"kind": "grpo"},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 2, "final_fraction": 1.0},
        "batch": {"global_sequences": 32, "micro_sequences": 8, "virtual_ranks": 4, "pad_to_multiple_of": 16},
        "rollouts": {"prompts": str(folder / "prompts.jsonl"), "reward": {"kind": "exact_match"}, "group": 4,
                     "answer_tokens": 4, "most_failed_fraction": 0.5},
        "evaluation": {"sample_tokens": 0}, "metrics": {"trackers": []},
        "checkpoint": {"every_steps": 20, "memory_tier": {"every_steps": 1}},
        "guards": {"collective_timeout_seconds": 5},
        "elastic": {"min_workers": 1, "max_workers": 1, "join_wait_seconds": 1, "resize_interval_seconds": 2},
    }, overrides)
