"""Who goes and who stays, against brute force over Python tuples."""

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import dedup

BUCKETS = st.tuples(st.integers(0, 1), st.integers(0, 2))
QUALITIES = st.sampled_from([0.0, 0.5, 1.0, float("nan"), None])


@st.composite
def documents(draw, max_size: int = 12) -> list[dict]:
    ids = draw(st.lists(st.text("abcé中", min_size=1, max_size=3), unique=True, max_size=max_size))
    return [{"id": name, "priority": draw(st.integers(-1, 1)), "quality": draw(QUALITIES),
             "length": draw(st.integers(0, 2))} for name in ids]


def rank(document: dict) -> tuple:
    """Smaller is better: the total order as a Python sort key (ids compare by their UTF-8 bytes)."""
    quality = document["quality"]
    known = quality is not None and quality == quality
    return (-document["priority"], not known, -quality if known else 0.0, -document["length"], document["id"].encode())


def keys_table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=dedup.KEY_SCHEMA)


@given(documents(), st.data())
@settings(max_examples=60, deadline=None)
def test_exact_duplicates_keep_the_best_of_each_group(rows: list[dict], data: st.DataObject):
    for row in rows:
        row["hash_hi"], row["hash_lo"] = data.draw(st.sampled_from([(0, 0), (0, 1), (1, 0), (2**64 - 1, 5)]))
    found = dedup.exact_duplicates(keys_table(rows))
    assert found.schema.equals(dedup.DROPPED_SCHEMA)
    expected = {}
    for row in rows:
        group = [other for other in rows if (other["hash_hi"], other["hash_lo"]) == (row["hash_hi"], row["hash_lo"])]
        best = min(group, key=rank)
        if best is not row:
            expected[row["id"]] = best["id"]
    assert dict(zip(found["id"].to_pylist(), found["survivor"].to_pylist(), strict=True)) == expected
    assert set(found["score"].to_pylist()) <= {1.0}
    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    assert dedup.exact_duplicates(keys_table(shuffled)).equals(found)


def test_rows_of_one_id_are_one_document():
    row = {"hash_hi": 1, "hash_lo": 2, "id": "x", "priority": 0, "quality": 1.0, "length": 3}
    assert len(dedup.exact_duplicates(keys_table([row, row]))) == 0
    better = row | {"id": "y", "priority": 1}
    assert dedup.exact_duplicates(keys_table([row, row, better])).to_pylist() == [
        {"id": "x", "survivor": "y", "score": 1.0}]


@given(documents(), st.data())
@settings(max_examples=60, deadline=None)
def test_candidates_are_pairs_of_one_bucket_better_first(rows: list[dict], data: st.DataObject):
    order = {row["id"]: rank(row) for row in rows}
    members: dict[tuple[int, int], list[str]] = {}
    table = []
    for row in rows:
        for band, value in data.draw(st.lists(BUCKETS, unique=True, max_size=4)):
            table.append(row | {"band": band, "hash": value})
            members.setdefault((band, value), []).append(row["id"])
    found = dedup.band_candidates(pa.Table.from_pylist(table, schema=dedup.BAND_SCHEMA))
    assert found.schema.equals(dedup.EDGE_SCHEMA)
    pairs = list(zip(found["a"].to_pylist(), found["b"].to_pylist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    expected = set()
    for group in members.values():
        group.sort(key=order.__getitem__)
        expected |= {(group[0], other) for other in group[1:]}
        expected |= {(group[i], group[j]) for i in range(len(group)) for j in range(i + 1, i + 1 + dedup.NEIGHBOURS)
                     if j < len(group)}
    assert set(pairs) == expected
    random.Random(1).shuffle(table)
    assert dedup.band_candidates(pa.Table.from_pylist(table, schema=dedup.BAND_SCHEMA)).equals(found)


def slow_cluster(count: int, edges: list[tuple[int, int, float]]) -> dict[int, tuple[int, float]]:
    """The greedy rule, literally: documents are numbers, smaller is better."""
    kept: list[int] = []
    dropped = {}
    for document in range(count):
        options = [(-score, a) for a, b, score in edges if b == document and a in kept]
        if options:
            score, survivor = min(options)
            dropped[document] = (survivor, -score)
        else:
            kept.append(document)
    return dropped


@given(st.integers(2, 14), st.data())
@settings(max_examples=100, deadline=None)
def test_cluster_is_the_greedy_rule_for_any_order_of_edges(count: int, data: st.DataObject):
    pairs = list(itertools.combinations(range(count), 2))
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.sampled_from([0.75, 0.8, 0.9])), max_size=40))
    edges = [(a, b, score) for (a, b), score in chosen]
    table = pa.Table.from_pylist([{"a": f"d{a:02}", "b": f"d{b:02}", "score": score} for a, b, score in edges],
                                 schema=dedup.SCORED_EDGE_SCHEMA)
    found = dedup.cluster(table)
    expected = {f"d{b:02}": (f"d{a:02}", score) for b, (a, score) in slow_cluster(count, edges).items()}
    assert {row["id"]: (row["survivor"], row["score"]) for row in found.to_pylist()} == expected
    assert found["id"].to_pylist() == sorted(expected)
    permuted = table.take(np.random.default_rng(0).permutation(len(table)))
    assert dedup.cluster(permuted).equals(found)


def test_a_chain_does_not_collapse():
    ids = [f"{number:05}" for number in range(5000)]
    chain = pa.table({"a": ids[:-1], "b": ids[1:], "score": np.full(4999, 0.8)})
    found = dedup.cluster(chain)
    assert found["id"].to_pylist() == ids[1::2]  # each is a neighbour of its survivor; a union-find drops 4,999
    assert found["survivor"].to_pylist() == ids[:-1:2]


def test_nothing_and_contradictions():
    empty = dedup.SCORED_EDGE_SCHEMA.empty_table()
    assert dedup.cluster(empty).equals(dedup.DROPPED_SCHEMA.empty_table())
    assert len(dedup.exact_duplicates(dedup.KEY_SCHEMA.empty_table())) == 0
    assert len(dedup.band_candidates(dedup.BAND_SCHEMA.empty_table())) == 0
    circle = pa.table({"a": ["x", "y"], "b": ["y", "x"], "score": [0.9, 0.9]})
    with pytest.raises(ValueError, match="contradict"):
        dedup.cluster(circle)
