"""Tests of the S-curve, and of the choice of bands and rows, compared with datasketch's."""

import numpy as np
import pytest
from datasketch import MinHashLSH
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.config import build
from tidewheel.data.config import DedupNearStep
from tidewheel.data.dedup.banding import collision_probability, optimal_banding
from tidewheel.errors import ConfigError


@given(st.integers(20, 90), st.sampled_from([64, 112, 128]))
@settings(max_examples=12, deadline=None)
def test_optimal_banding_equals_datasketchs(percent: int, permutations: int):
    peer = MinHashLSH(threshold=percent / 100, num_perm=permutations)
    assert optimal_banding(percent / 100, permutations) == (peer.b, peer.r)


def test_collision_probability_equals_published_values():
    curve = collision_probability(np.array([0.5, 0.75, 0.85]), 14, 8)
    np.testing.assert_allclose(curve, [0.053, 0.772, 0.988], atol=5e-4)
    assert collision_probability(0.0, 3, 2) == 0
    assert collision_probability(1.0, 3, 2) == 1


def test_optimal_banding_refuses_wrong_arguments():
    for threshold, permutations in ((0.0, 8), (1.0, 8), (0.5, 0)):
        with pytest.raises(ValueError, match="threshold"):
            optimal_banding(threshold, permutations)


def test_a_target_similarity_sets_bands_and_rows():
    step = build(DedupNearStep, {"target_jaccard": 0.8})
    assert (step.bands, step.rows, step.num_permutations) == (9, 13, 128)
    assert build(DedupNearStep, step.canonical()) == step
    assert build(DedupNearStep, {"target_jaccard": 0.7, "permutations": 112}).bands == 12
    assert build(DedupNearStep, {"permutations": 256}).num_permutations == 256
    with pytest.raises(ConfigError, match="means 9 bands of 13 rows"):
        build(DedupNearStep, {"target_jaccard": 0.8, "bands": 14})
    with pytest.raises(ConfigError, match="need 112 permutations, not 64"):
        build(DedupNearStep, {"permutations": 64})
    with pytest.raises(ConfigError, match="target_jaccard"):
        build(DedupNearStep, {"target_jaccard": 1.5})
