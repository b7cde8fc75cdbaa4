"""Tests of how context parallelism shards rows. `test_equivalence` trains with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.parallel.layouts import LENGTH, micro_batches
from tidewheel.models.attention import document_mask
from tidewheel.models.decoder import IGNORED
from tidewheel.train.parallel.context import kept_positions, share


@given(st.integers(1, 8), st.integers(1, 6))
def test_every_position_is_kept_once_and_causal_work_is_even(size: int, chunk: int):
    length = 2 * size * chunk
    kept = [kept_positions(length, rank, size) for rank in range(size)]
    assert torch.cat(kept).sort().values.tolist() == list(range(length))
    assert all(places.tolist() == sorted(places.tolist()) for places in kept)
    assert len({int((places + 1).sum()) for places in kept}) == 1, "query i sees i + 1 keys"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_partition_the_micro_batch(size: int):
    micro = micro_batches(0)[0]
    shares = [share(micro, rank, size) for rank in range(size)]
    assert sum(int((part.targets != IGNORED).sum()) for part in shares) == micro.num_targets
    for rank, part in enumerate(shares):
        kept = kept_positions(micro.tokens.shape[1], rank, size)
        assert torch.equal(part.targets, micro.targets[:, kept]), "made before the cut"
        assert torch.equal(part.positions, micro.positions[:, kept]), "counted from the document's beginning"
        assert torch.equal(part.segment_ids, micro.segment_ids), "whole: keys are"


@pytest.mark.parametrize("size", [2, 4])
def test_queries_of_a_share_see_the_same_keys_as_in_the_whole_row(size: int):
    segments = micro_batches(0)[0].segment_ids
    kept = [kept_positions(LENGTH, rank, size) for rank in range(size)]
    everyone, whole = torch.cat(kept), document_mask(segments).dense
    for mine in kept:
        mask = document_mask(segments[:, mine], places=mine, key_segments=segments[:, everyone], key_places=everyone)
        assert torch.equal(mask.dense, whole[:, :, mine][..., everyone])
