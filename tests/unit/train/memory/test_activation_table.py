"""The measured table of activation checkpointing beside its formulas."""

from __future__ import annotations

import pytest

from tests.benchmarks.activation_table import DIM, HEADS, KINDS, measure


@pytest.mark.long
def test_measured_as_the_formulas_say():
    """Of two blocks: full keeps inputs alone, attention recomputed drops the scores, every second block keeps all."""
    length = 64
    one, two = (measure({}, layers, length) for layers in (1, 2))
    ends, block = 2 * one[0] - two[0], two[0] - one[0]
    results = {name: measure(KINDS[name], 2, length) for name in ("full", "attention", "every_nth, every: 2")}
    kept = {name: (result[0] - ends) / 2 for name, result in results.items()}
    again = {name: (result[2] - two[2]) / two[1] for name, result in results.items()}
    assert kept["full"] == pytest.approx(2 * DIM, rel=0.05)
    assert kept["every_nth, every: 2"] == pytest.approx((block + kept["full"]) / 2, rel=0.02)
    assert block - kept["attention"] > 2 * HEADS * length
    assert 0 < again["attention"] < again["full"] < 1
    assert again["every_nth, every: 2"] == pytest.approx(again["full"] / 2, rel=0.02)
