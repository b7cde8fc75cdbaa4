"""Micro-batches of equal attention: who computes which rows, and that the run reads the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Script, config, write_shards
from tidewheel.errors import ConfigError
from tidewheel.inference.sample import text_sample
from tidewheel.shards.source import SourceReader, open_source
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.equal_attention import equal_costs
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_every_sequence_is_in_one_micro_batch(micro_sequences: int, virtual_ranks: int, parts: int, seed: int):
    count = micro_sequences * virtual_ranks * parts
    costs = np.random.default_rng(seed).integers(1, 1000, count)
    order = equal_costs(costs, micro_sequences, virtual_ranks)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, equal_costs(costs, micro_sequences, virtual_ranks))


def test_costs_of_micro_batches_and_of_workers_become_nearly_equal():
    costs = np.random.default_rng(0).uniform(1, 30, 256)
    order = equal_costs(costs, 4, 8)

    def unevenness(chosen: np.ndarray, groups: int) -> float:
        sums = costs[chosen].reshape(groups, -1).sum(axis=1)
        return float(sums.max() / sums.mean())

    in_order = np.arange(256)
    for groups in (8, 4):  # workers
        assert unevenness(order, groups) < 1.01 < unevenness(in_order, groups)
    assert unevenness(order, 64) < 1.1 < 1.5 < unevenness(in_order, 64)


def test_costs_are_pairs_of_tokens_of_one_document(tmp_path: Path):
    write_shards(tmp_path / "shards", shards=2, rows=12)
    reader = SourceReader(open_source(str(tmp_path / "shards"), None, 7))
    positions = np.arange(20)
    rows = reader.read(positions)
    expected = []
    for segments in rows.segment_ids:
        same = (segments[:, None] == segments[None]) & (segments >= 0)[:, None]
        expected.append(int(np.tril(same).sum()))
    assert reader.attention_pairs(positions).tolist() == expected
    reader.close()


def balanced(folder: Path, ranks: int) -> None:
    rank = dist.get_rank() if ranks > 1 else 0
    settings = config(folder, f"on-{ranks}", "reproducible=true", "batch.equal_attention=true", "parallel.data=ddp",
                      "batch.global_sequences=16", "batch.micro_sequences=2", "steps=4", "evaluation.every_steps=0")
    train(settings, Runtime(rank, ranks, checkpoints=FileCheckpoints(folder / f"{ranks}.npz"), control=Script(),
                            sampler=text_sample))


def lines_of(folder: Path, run: str) -> list[bytes]:
    return store(folder / f"runs/{run}").read("batches.jsonl").splitlines()


def test_the_run_has_the_same_batches_and_bits_on_any_number_of_workers(tmp_path: Path):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, seed=1)
    on_ranks(2, balanced, tmp_path, 2)
    balanced(tmp_path, 1)
    usual = config(tmp_path, "usual", "batch.global_sequences=16", "steps=4", "evaluation.every_steps=0")
    train(usual, Runtime(checkpoints=FileCheckpoints(tmp_path / "usual.npz"), sampler=text_sample))
    digests = [[json.loads(line)["digest"] for line in lines_of(tmp_path, run)]
               for run in ("on-1", "on-2", "usual")]
    assert digests[0] == digests[1] == digests[2]
    assert audit(str(tmp_path / "runs/on-2")).ok
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "2.npz") as two:
        for name in one.files:
            assert name == "extra" or np.array_equal(one[name], two[name]), name


def test_other_sets_and_groups_by_length_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"objective.kind dpo reads .*; nearest legal choice: batch.group_by_length"):
        config(tmp_path, "run", "batch.equal_attention=true", "objective.kind=dpo", "data.validation=''")
    with pytest.raises(ConfigError, match="both say which sequences form a micro-batch"):
        config(tmp_path, "run", "batch.equal_attention=true", "batch.group_by_length=true",
               "batch.pad_to_multiple_of=4")
