"""Workers with shares by their speed: who computes how much, and that the result does not change."""

from __future__ import annotations

import itertools
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
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.loop import train
from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.pass_time import PassTime
from tidewheel.train.runtime import Runtime
from tidewheel.train.speed_shares import better, shares

UNEVEN = ("steps=6", "batch.global_sequences=12", "batch.virtual_ranks=6", "elastic.share_by_speed_every_steps=2",
          "evaluation.every_steps=0")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(0, 5))
def test_the_slowest_worker_is_done_as_soon_as_possible(seconds: list[float], more: int):
    virtual_ranks = len(seconds) + more
    possible = [counts for counts in itertools.product(range(1, virtual_ranks + 1), repeat=len(seconds))
                if sum(counts) == virtual_ranks]

    def slowest(counts: tuple[int, ...]) -> float:
        return max(each * count for each, count in zip(seconds, counts))

    found = shares(seconds, virtual_ranks)
    assert sum(found) == virtual_ranks
    assert slowest(found) == pytest.approx(min(map(slowest, possible)))


def test_shares_change_only_if_that_saves_time():
    assert better([1.0, 2.0], [6, 6]) == (8, 4)
    assert better([1.0, 2.1], [8, 4]) is None
    assert better([1.0, 1.04], [6, 6]) is None
    assert better([0.0, 1.0], [6, 6]) is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_every_micro_batch_belongs_to_one_worker(virtual_ranks: list[int], parts: int):
    total = parts * sum(virtual_ranks)
    held = [MicroBatchShare(rank, len(virtual_ranks), virtual_ranks=tuple(virtual_ranks))
            for rank in range(len(virtual_ranks))]
    assert [micro for share in held for micro in share.of(total)] == list(range(total))
    assert {share.total(len(share.of(total))) for share in held} == {total}


def uneven(folder: Path, *overrides: str) -> None:
    """Train on two ranks, of which the second one says that it is three times as slow."""
    slowness = 1 + 2 * dist.get_rank()
    PassTime.read = lambda self: 0.01 * slowness  # type: ignore[method-assign]
    control = Script()
    train(config(folder, "uneven", *UNEVEN, *overrides), Runtime(
        dist.get_rank(), 2, checkpoints=FileCheckpoints(folder / "uneven.npz"), control=control, sampler=text_sample))
    if dist.get_rank() == 0:
        (folder / "events.json").write_text(json.dumps(control.events))


@pytest.mark.parametrize("overrides", [
    ("reproducible=true", "parallel.data=ddp"),
    ("reproducible=true", "parallel.data=zero1", "batch.group_by_length=true",
     "batch.pad_to_multiple_of=4", "batch.micro_sequences=1"),
    ("reproducible=false", "parallel.data=ddp")])
def test_uneven_shares_read_the_same_batches_and_give_the_same_model(tmp_path: Path, overrides: tuple[str, ...]):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, seed=1)
    on_ranks(2, uneven, tmp_path, *overrides)
    alone = config(tmp_path, "alone", *UNEVEN, *overrides)
    train(alone, Runtime(checkpoints=FileCheckpoints(tmp_path / "alone.npz"), sampler=text_sample))
    events = [detail for kind, detail in json.loads((tmp_path / "events.json").read_text()) if kind == "shares"]
    assert [(event["before"], event["virtual_ranks"]) for event in events] == [([3, 3], [5, 1])]
    assert audit(str(tmp_path / "runs/uneven")).ok
    batches = [store(tmp_path / f"runs/{run}").read("batches.jsonl") for run in ("alone", "uneven")]
    digests = [[json.loads(line)["digest"] for line in lines.splitlines()] for lines in batches]
    assert digests[0] == digests[1]
    with np.load(tmp_path / "alone.npz") as one, np.load(tmp_path / "uneven.npz") as two:
        for name in one.files:
            if name != "extra" and "reproducible=true" in overrides:
                assert np.array_equal(one[name], two[name]), name
            elif name != "extra":
                np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("override", "told"), [
    ("parallel.data=zero3", "each pass gathers parameters from all workers; nearest legal choice: data zero1"),
    ("parallel.context=2", "nearest legal choice: context 1"),
    ("guards.recomputation={}", "leave guards.recomputation out")])
def test_layouts_whose_workers_pass_together_are_refused(tmp_path: Path, override: str, told: str):
    with pytest.raises(ConfigError, match=told):
        config(tmp_path, "run", "parallel.data=zero1", "reproducible=true", *UNEVEN, override)
