"""Tests that the gradient norm is correct and does not depend on how rows are sharded."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.reproducible import norm

SHAPES = [(7, 33), (5,), (12, 1), (3, 300), (1, 17), (9, 256)]


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-12, 12, shape, generator=generator)
            for shape in SHAPES]


@given(st.integers(0, 10**6), st.data())
def test_any_split_of_the_rows_gives_the_same_bits(seed, data):
    whole = tensors(seed)
    expected = norm.value(norm.pieces(norm.row_squares(whole)))
    ranks = data.draw(st.integers(1, 6))
    total = torch.zeros(norm.PLACES, dtype=torch.float64)
    shares = [[rows[rank] for rows in (tensor.tensor_split(ranks) for tensor in whole)] for rank in range(ranks)]
    for share in data.draw(st.permutations(shares)):
        total += norm.pieces(norm.row_squares(share))
    assert torch.equal(norm.value(total), expected)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 1))
def test_stacked_matrices_may_be_split_by_matrix_or_by_rows(seed, ranks, dim):
    whole = torch.randn(6, 10, 13, generator=torch.Generator().manual_seed(seed))
    parts = norm.row_squares([part.contiguous() for part in whole.chunk(ranks, dim=dim)])
    assert torch.equal(norm.value(norm.pieces(parts)), norm.value(norm.pieces(norm.row_squares([whole]))))


@pytest.mark.parametrize("cached", [1, 40, 512])
def test_rows_are_added_up_alike_however_many_at_a_time(cached, monkeypatch):
    whole = tensors(3)
    expected = norm.row_squares(whole)
    monkeypatch.setattr(norm, "CACHED", cached)
    assert torch.equal(norm.row_squares(whole), expected)


@given(st.integers(0, 10**6))
def test_the_norm_equals_the_exact_sum_of_squares(seed):
    whole = tensors(seed)
    exact = sum(Fraction(x) ** 2 for tensor in whole for x in tensor.flatten().tolist())
    assert norm.value(norm.pieces(norm.row_squares(whole))).item() == pytest.approx(float(exact), rel=1e-14)


@given(st.lists(st.floats(0, 2.0**300, allow_subnormal=False), max_size=50))
def test_sums_in_fixed_point_are_exact(numbers):
    sums = torch.tensor([x if x > 2.0**-250 else 0.0 for x in numbers], dtype=torch.float64)
    pieces = norm.pieces(sums)
    result = sum(Fraction(piece) * Fraction(2) ** (norm.TOP - norm.BITS * (place + 1))
                for place, piece in enumerate(pieces.tolist()))
    assert result == sum(map(Fraction, sums.tolist()))


@pytest.mark.parametrize("extreme", [2.0**-149, 2.0**127, 1.0])
def test_the_smallest_and_the_largest_numbers_are_summed_exactly(extreme):
    square = norm.value(norm.pieces(norm.row_squares([torch.full((3, 2), extreme)])))
    assert square.item() == 6 * Fraction(extreme) ** 2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_of_non_finite_gradients_is_not_finite(bad):
    gradient = torch.ones(4, 3)
    gradient[2, 1] = bad
    assert not norm.value(norm.pieces(norm.row_squares([gradient]))).isfinite()


def test_the_norm_of_no_rows_is_zero():
    assert norm.value(norm.pieces(norm.row_squares([torch.zeros(0, 3)]))).item() == 0
