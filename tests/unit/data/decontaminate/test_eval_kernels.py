"""Tests of the alignment of an item with a document, compared with the textbook algorithm."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidewheel.data.decontaminate import eval_kernels

WORDS = st.lists(st.integers(1, 6), min_size=1, max_size=14)


def score(document: list[int], item: list[int]) -> int:
    """Return the best local alignment score (Smith and Waterman 1981).

    An equal word scores 2; a changed, missing or additional one scores -1.
    """
    table = [[0] * (len(document) + 1) for _ in range(len(item) + 1)]
    for j, word in enumerate(item, 1):
        for i, other in enumerate(document, 1):
            table[j][i] = max(0, table[j - 1][i - 1] + (2 if word == other else -1), table[j - 1][i] - 1,
                              table[j][i - 1] - 1)
    return max(map(max, table))


@given(WORDS, WORDS)
@examples(100)
def test_the_alignment_has_the_best_score(document: list[int], item: list[int]):
    band = len(document) + len(item)
    rows, gains = np.zeros((2, 5, 2 * band + 3), np.int32), np.zeros((2, 2 * band + 3))
    best = np.zeros(5, np.int64)
    weights = np.array([word / 4 for word in item], np.float32)  # sums are exact
    weight = eval_kernels._align(np.array(document, np.uint64), 0, len(document), np.array(item, np.uint32), weights, 0,
                                 band, rows, gains, best)
    equal, first, end, start, stop = best.tolist()
    assert score(document[first:end], item[start:stop]) == score(document, item)
    if not equal:
        assert not set(document) & set(item)
        return
    assert (document[first], document[end - 1]) == (item[start], item[stop - 1])  # it begins and ends with a match
    edits = 2 * equal - score(document, item)
    assert max(end - first, stop - start) <= equal + edits
    assert 0.25 * equal <= weight <= sum(weights[start:stop])


@given(WORDS, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_keys_distinguish_ngrams_and_tables_return_them(words: list[int], length: int):
    hashes = np.array(words, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    starts = np.arange(max(len(words) - length + 1, 0))
    keys = np.empty(len(starts), np.uint64)
    eval_kernels.gram_keys(hashes, starts, length, keys)
    grams = [tuple(words[start : start + length]) for start in starts.tolist()]
    assert len(set(keys.tolist())) == len(set(grams))
    unique = np.unique(keys)
    table, indices = np.zeros(64, np.uint64), np.full(64, -1, np.int64)
    eval_kernels.insert(unique, table, indices)
    assert all(eval_kernels._gram(table, indices, key) == index for index, key in enumerate(unique))
    assert eval_kernels._gram(table, indices, np.uint64(12345)) == -1
