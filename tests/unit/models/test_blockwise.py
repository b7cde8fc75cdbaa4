"""Tests of blockwise attention, against a softmax over the whole score matrix."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.models import attention_operator, blockwise
from tidewheel.models.attention_operator import Plan, handle_of, planned_attention
from tidewheel.models.blockwise import Blockwise, Intervals, Scores, key_intervals
from tidewheel.models.recomputed_attention import RecomputedAttention

ROWS, HEADS, KEY_HEADS, WIDTH, VALUES = 2, 4, 2, 8, 6
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles small, so that a short row has many."""
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(blockwise, "KEYS", 16)


def inputs(queries: int, keys: int, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, queries, WIDTH), (KEY_HEADS, keys, WIDTH), (KEY_HEADS, keys, VALUES))
    q, k, v = (torch.randn(ROWS, *shape, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v


def segments(length: int, seed: int) -> torch.Tensor:
    """Return segment ids [ROWS, length] of documents of random lengths, with padding at the end of the last row."""
    generator = np.random.default_rng(seed)
    ids = torch.from_numpy((generator.random((ROWS, length)) < 0.1).cumsum(axis=1))
    ids[-1, -5:] = -1
    return ids


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor,
                      scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the logarithms of the softmax's sums, with all scores in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * scores.scale
    if scores.cap:
        s = scores.cap * torch.tanh(s / scores.cap)
    s = s.masked_fill(~mask, -1e30)  # a query may see nothing
    lse = s.logsumexp(dim=-1)
    return (s - lse[..., None]).exp() @ v, lse


def masked_attention(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                     scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    return softmax_attention(q, k, v, mask, scores)


def assert_equal_with_gradients(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor],
                                wanted: Tensors) -> None:
    generator = torch.Generator().manual_seed(9)
    gradients = [torch.randn(x.shape, generator=generator) for x in ours]
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    for one, other in zip(torch.autograd.grad(ours, wanted, gradients), torch.autograd.grad(theirs, wanted, gradients)):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.integers(3, 70), st.sampled_from([None, 1, 5, 40]), st.sampled_from([0.0, 2.0]), st.integers(0, 99))
def test_blockwise_attention_is_attention(length: int, window: int | None, cap: float, seed: int):
    q, k, v = inputs(length, length, seed)
    ids = segments(length, seed)
    index = torch.arange(length)
    seen = key_intervals(ids, index.expand(ROWS, -1), window=window)
    distance = index[:, None] - index
    expected = (ids[:, :, None] == ids[:, None]) & (distance >= 0) & (distance < (window or length))
    assert torch.equal(seen.dense(length)[:, 0], expected)
    scores = Scores(0.4, cap)
    ours = planned_attention(q, k, v, handle_of(Blockwise(seen)), scores)
    assert_equal_with_gradients(ours, softmax_attention(q, k, v, expected[:, None], scores), (q, k, v))


def test_tiles_hold_every_visible_score_and_few_others():
    ids = segments(200, seed=1)
    seen = key_intervals(ids, torch.arange(200).expand(ROWS, -1), window=30)
    plan = Blockwise(seen)
    mask, covered = seen.dense(200)[:, 0], torch.zeros(ROWS, 200, 200, dtype=torch.bool)
    for block in plan.blocks:
        for tile in block:
            part = covered[tile.row, tile.start:tile.end, tile.first:tile.last]
            assert not part.any(), "each score once"
            part[:] = True
            if tile.whole:
                assert mask[tile.row, tile.start:tile.end, tile.first:tile.last].all()
    assert not (mask & ~covered).any()
    assert int(covered.sum()) < 0.2 * covered.numel()
    assert seen.scores == int(mask.sum())


@pytest.mark.parametrize("kind", ["blockwise", "recomputed"])
def test_gradients_of_pieces_add_up(kind: str):
    """Two pieces of the keys, each with the normaliser of the whole softmax."""
    length, half = 48, 24
    q, k, v = inputs(length, length)
    places = torch.arange(length).expand(ROWS, -1)
    ids, scores = segments(length, seed=3), Scores(0.3)
    mask = key_intervals(ids, places).dense(length)
    out, lse = softmax_attention(q, k, v, mask, scores)
    grad = torch.randn(out.shape)
    delta = (grad * out).sum(dim=-1).detach()
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for part in (slice(0, half), slice(half, length)):
        of_piece = mask[..., part]
        if kind == "blockwise":
            plan: Plan = Blockwise(key_intervals(ids, places, places[:, part]))
        else:
            plan = RecomputedAttention(functools.partial(masked_attention, of_piece))
        dq, dk, dv = plan.backward(grad, q, k[:, :, part], v[:, :, part], lse.detach(), delta, scores)
        total[0] += dq
        total[1][:, :, part] += dk
        total[2][:, :, part] += dv
    for ours, theirs in zip(total, torch.autograd.grad(out, (q, k, v), grad)):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_plan_lives_as_long_as_its_handle():
    handle = handle_of(Blockwise(Intervals(torch.zeros(1, 1).long(), torch.ones(1, 1).long())))
    number = int(handle)
    alias = handle.detach()
    del handle
    gc.collect()
    assert number in attention_operator._plans, "a saved tensor may be an alias"
    del alias
    gc.collect()
    assert number not in attention_operator._plans
