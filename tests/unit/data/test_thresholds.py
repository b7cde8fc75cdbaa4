"""The first failing rule gives the reason; compared with a loop over documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.data.thresholds import LEAST, MOST, first_failing

RULES = (("a", LEAST, "a_small"), ("b", MOST, "b_large"), ("a", MOST, "a_large"))
LIMITS = {"a": (2.0, 5.0), "b": (None, 3.0)}


def slowly(a: float, b: float) -> str:
    if a < 2:
        return "a_small"
    if b > 3:
        return "b_large"
    return "a_large" if a > 5 else ""


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=20))
def test_first_failing_equals_a_loop(documents):
    a, b = (np.array([document[side] for document in documents], np.float64) for side in (0, 1))
    assert first_failing({"a": a, "b": b}, LIMITS, RULES) == [slowly(*document) for document in documents]
