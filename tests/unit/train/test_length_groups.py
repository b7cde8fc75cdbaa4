"""Micro-batches of similar length: the same global batches, in fewer tokens, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks
from tests.unit.train.helpers import LENGTH, VOCABULARY, config, write_shards, write_tokenizer
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.data.tokenize.pack import pack
from tidewheel.errors import ConfigError
from tidewheel.shards.format import write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.length_groups import padded_length, similar_lengths
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

GROUPED = ("batch.group_by_length=true", "batch.pad_to_multiple_of=4")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_groups_hold_each_sequence_once_and_pad_least(micro: int, virtual: int, parts: int, seed: int):
    lengths = np.random.default_rng(seed).integers(1, 100, micro * virtual * parts)
    order = similar_lengths(lengths, micro, virtual)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    longest = lengths[order].reshape(virtual, parts, micro).max(axis=2)
    best = np.sort(lengths)[::-1].reshape(-1, micro)[:, 0].sum()
    assert longest.sum() == best, "no other grouping pads less"
    assert (np.diff(longest, axis=1) <= 0).all(), "the longest first"
    assert (longest[:, :-1].min(axis=0, initial=100) >= longest[:, 1:].max(axis=0, initial=0)).all() or parts == 1


def test_rows_are_padded_to_the_longest_rounded_up():
    lengths = np.array([3, 17])
    assert padded_length(lengths, 8, 64) == 24
    assert padded_length(lengths, 8, 20) == 20, "the rows of the set are no longer"
    assert padded_length(lengths, 0, 64) == 64


def write_unpacked(folder: Path) -> None:
    """Write a set with one document in each row, of very different lengths."""
    random, target = np.random.default_rng(0), storage.store(folder)
    sizes = np.minimum(random.lognormal(1.3, 0.7, 48).astype(np.int64) + 1, LENGTH)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    tokens = random.integers(2, 28, offsets[-1])
    table = pack([f"doc{i}" for i in range(48)], tokens, offsets, sequence_length=LENGTH, token_dtype="uint16",
                 pad_id=1, method="one_per_row")
    assert table["length"].to_pylist() == sizes.tolist()
    write_manifest(target, Manifest(
        sequence_length=LENGTH, token_dtype="uint16", vocabulary_size=VOCABULARY, tokenizer=write_tokenizer(target),
        recipe_hash="test", evaluation_sets=(), documents=48, shards=(write_shard(target, table),)))


def train_run(wanted: TrainConfig, rank: int = 0, size: int = 1) -> None:
    checkpoints = CheckpointManager(storage.store(wanted.run_uri).child("checkpoints"), asynchronous=False)
    train(wanted, Runtime(rank, size, checkpoints=checkpoints))


def train_on_ranks(configs: list[TrainConfig]) -> None:
    import torch.distributed as dist

    for wanted in configs:
        train_run(wanted, dist.get_rank(), dist.get_world_size())


def test_grouped_batches_are_the_same_batches(tmp_path: Path):
    write_unpacked(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, rows=5)
    common = ("steps=4", "evaluation.every_steps=0", "checkpoint.every_steps=0", "batch.global_sequences=16")
    runs = {"plain": config(tmp_path, "plain", *common), "grouped": config(tmp_path, "grouped", *common, *GROUPED)}
    layouts = {"data": "parallel.data=zero2", "pipeline": "parallel.pipeline=2", "context": "parallel.context=2"}
    shared = [config(tmp_path, name, *common, *GROUPED, layout) for name, layout in layouts.items()]
    for wanted in runs.values():
        train_run(wanted)
    on_ranks(2, train_on_ranks, shared)
    stores = {name: storage.store(tmp_path / "runs" / name) for name in (*runs, *layouts)}
    losses = {name: [line["loss"] for line in jsonlog.read(store, "metrics.jsonl") if "loss" in line]
              for name, store in stores.items()}
    digests = {name: [line["digest"] for line in jsonlog.read(store, "batches.jsonl")]
               for name, store in stores.items()}
    for name in stores:
        assert digests[name] == digests["plain"], name
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-5), name
        assert audit(str(tmp_path / "runs" / name)).ok, name


@pytest.mark.parametrize(("overrides", "words"), [
    (("batch.group_by_length=true",), "nearest legal choice: pad_to_multiple_of 64"),
    ((*GROUPED, "parallel.context=2", "parallel.tensor=2", "batch.pad_to_multiple_of=20"),
     "nearest legal choice: 16"),
    ((*GROUPED, "precision=fp16"), "nearest legal choice: precision bf16")])
def test_what_cannot_be_grouped_is_refused(tmp_path: Path, overrides: tuple[str, ...], words: str):
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, "run", "elastic.max_workers=4", *overrides)
