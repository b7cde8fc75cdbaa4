"""Tests of the batch-size ramp: each step's size and the sequences before it, against counting step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train.batch_config import BatchConfig
from tidewheel.train.batch_size import BatchSizes

ramps = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 200)), max_size=3, unique_by=lambda stage: stage[0]).map(
    lambda stages: [{"sequences": 2 * size, "tokens": tokens} for size, tokens in sorted(stages)])


def ramped(ramp: list[dict[str, int]], length: int) -> BatchSizes:
    values = {"global_sequences": 16, "micro_sequences": 1, "virtual_ranks": 2, "ramp": ramp}
    return BatchSizes.of(build(BatchConfig, values), length)


@given(ramps, st.integers(1, 9))
def test_sizes_are_those_of_a_walk_through_the_stages(ramp: list[dict[str, int]], length: int):
    walked, left = [], [dict(stage) for stage in ramp]
    for _ in range(100):
        if left:
            walked.append(left[0]["sequences"])
            left[0]["tokens"] -= left[0]["sequences"] * length
            if left[0]["tokens"] <= 0:
                left.pop(0)
        else:
            walked.append(16)
    sizes, steps = ramped(ramp, length), np.arange(1, 101)
    assert sizes.counts(steps).tolist() == walked
    assert sizes.taken(np.arange(101)).tolist() == [0, *np.cumsum(walked).tolist()]
    for step in range(101):
        assert sizes.steps(sizes.total(step)) == step
        assert sizes.steps(sizes.total(step) + 1) == step


@pytest.mark.parametrize(("ramp", "says"), [
    ([{"sequences": 3, "tokens": 10}], "ramp.0.sequences 3 is not a multiple of virtual_ranks x micro_sequences"),
    ([{"sequences": 8, "tokens": 10}, {"sequences": 4, "tokens": 10}], "the batch must grow"),
    ([{"sequences": 16, "tokens": 10}], "goes 16 -> 16"),
    ([{"sequences": 8, "steps": 10}], "unknown key"),
])
def test_an_impossible_ramp_is_refused(ramp: list[dict[str, int]], says: str):
    with pytest.raises(ConfigError, match=says):
        ramped(ramp, 4)
