"""Tests of the choice of duplicates to drop, compared with brute force over Python tuples."""

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import dedup, verdicts

BUCKETS = st.tuples(st.integers(0, 1), st.integers(0, 2))
QUALITIES = st.sampled_from([0.0, 0.5, 1.0, float("nan"), None])


@st.composite
def documents(draw, max_size: int = 12) -> list[dict]:
    ids = draw(st.lists(st.text("abcé中", min_size=1, max_size=3), unique=True, max_size=max_size))
    return [{"id": name, "priority": draw(st.integers(-1, 1)), "quality": draw(QUALITIES),
             "length": draw(st.integers(0, 2))} for name in ids]


def rank(document: dict) -> tuple:
    """Return the sort key of the total order, where smaller is better; ids compare by their UTF-8 bytes."""
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
    result = dedup.exact_duplicates(keys_table(rows))
    assert result.schema.equals(dedup.DROPPED_SCHEMA)
    expected = {}
    for row in rows:
        group = [other for other in rows if (other["hash_hi"], other["hash_lo"]) == (row["hash_hi"], row["hash_lo"])]
        best = min(group, key=rank)
        if best is not row:
            expected[row["id"]] = best["id"]
    assert dict(zip(result["id"].to_pylist(), result["survivor"].to_pylist(), strict=True)) == expected
    assert set(result["score"].to_pylist()) <= {1.0}
    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    assert dedup.exact_duplicates(keys_table(shuffled)).equals(result)


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
    result = dedup.band_candidates(pa.Table.from_pylist(table, schema=dedup.BAND_SCHEMA))
    assert result.schema.equals(dedup.EDGE_SCHEMA)
    pairs = list(zip(result["a"].to_pylist(), result["b"].to_pylist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    expected = set()
    for group in members.values():
        group.sort(key=order.__getitem__)
        expected |= {(group[0], other) for other in group[1:]}
        expected |= {(group[i], group[j]) for i in range(len(group)) for j in range(i + 1, i + 1 + dedup.NEIGHBOURS)
                     if j < len(group)}
    assert set(pairs) == expected
    random.Random(1).shuffle(table)
    assert dedup.band_candidates(pa.Table.from_pylist(table, schema=dedup.BAND_SCHEMA)).equals(result)


def slow_cluster(count: int, edges: list[tuple[int, int, float]]) -> dict[int, tuple[int, float]]:
    """Apply the greedy rule literally; documents are numbers, and smaller ones are better."""
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
def test_cluster_applies_the_greedy_rule_for_any_order_of_edges(count: int, data: st.DataObject):
    pairs = list(itertools.combinations(range(count), 2))
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.sampled_from([0.75, 0.8, 0.9])), max_size=40))
    edges = [(a, b, score) for (a, b), score in chosen]
    table = pa.Table.from_pylist([{"a": f"d{a:02}", "b": f"d{b:02}", "score": score} for a, b, score in edges],
                                 schema=dedup.SCORED_EDGE_SCHEMA)
    result = dedup.cluster(table)
    expected = {f"d{b:02}": (f"d{a:02}", score) for b, (a, score) in slow_cluster(count, edges).items()}
    assert {row["id"]: (row["survivor"], row["score"]) for row in result.to_pylist()} == expected
    assert result["id"].to_pylist() == sorted(expected)
    permuted = table.take(np.random.default_rng(0).permutation(len(table)))
    assert dedup.cluster(permuted).equals(result)


def in_rounds(edges: pa.Table, partitions: int, tail: int = 0) -> tuple[pa.Table, int]:
    """Cluster as the stages do: partition edges by their worse document, and exchange fates round by round."""
    def partition(ids):
        return verdicts.partition_of(verdicts.hash_ids(dedup.plain_ids(ids)), partitions)

    states = [(edges.filter(pa.array(partition(edges["b"]) == number)), dedup.DROPPED_SCHEMA.empty_table())
              for number in range(partitions)]
    rounds = 0
    while sum(len(left) for left, _ in states) > tail:
        rounds += 1
        requested = [left["a"].combine_chunks().unique() for left, _ in states]
        states = [dedup.settle(*states[number], pa.concat_tables(
            dedup.fates(ids.filter(pa.array(partition(ids) == other)), *states[other]) for other in range(partitions)))
            for number, ids in enumerate(requested)]
    left, dropped = (pa.concat_tables(state[part] for state in states) for part in (0, 1))
    return dedup.cluster(left, dropped), rounds


@given(st.integers(2, 14), st.integers(1, 5), st.sampled_from([0, 3]), st.data())
@settings(max_examples=100, deadline=None)
def test_rounds_over_partitions_equal_cluster(count: int, partitions: int, tail: int, data: st.DataObject):
    pairs = list(itertools.combinations(range(count), 2))
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.sampled_from([0.75, 0.8, 0.9])), max_size=40))
    order = data.draw(st.permutations(range(count)))
    names = [f"\x00{number % 2}\x00d{order[number]:02}" if number < count // 3 else f"d{order[number]:02}"
             for number in range(count)]
    edges = pa.Table.from_pylist([{"a": names[a], "b": names[b], "score": score} for (a, b), score in chosen
                                  if b >= count // 3], schema=dedup.SCORED_EDGE_SCHEMA)
    result, _ = in_rounds(edges, partitions, tail)
    assert result.equals(dedup.cluster(edges))


def test_a_random_order_needs_logarithmically_many_rounds():
    generator = np.random.default_rng(3)
    count = 3000
    a, b = np.sort(generator.integers(0, count, (2, 4 * count)), axis=0)
    names = np.array([f"{number:05}" for number in generator.permutation(count)])
    a, b = a[a < b], b[a < b]
    edges = pa.table({"a": names[a], "b": names[b], "score": np.round(generator.random(len(a)), 1)})
    result, rounds = in_rounds(edges, 7)
    assert result.equals(dedup.cluster(edges))
    assert rounds <= 2 * np.log2(count)


def test_ids_of_earlier_dumps_sort_by_their_plain_ids():
    old = dedup.old_ids(pa.array(["b", "é"]), 12)
    assert dedup.is_old(pa.concat_arrays([old, pa.array(["b"])])).to_pylist() == [True, True, False]
    assert dedup.plain_ids(old).to_pylist() == ["b", "é"]
    edges = pa.table({"a": pa.concat_arrays([old[:1], pa.array(["a"])]), "b": ["x", "x"], "score": [0.8, 0.8]})
    assert dedup.cluster(edges)["survivor"].to_pylist() == ["a"], "a tie: the smaller id survives"


def test_a_bucket_of_boilerplate_gives_few_pairs():
    count = 50_000
    generator = np.random.default_rng(0)
    rows = pa.table([np.zeros(count, np.int32), np.zeros(count, np.uint64),
                     pa.array([f"{number:06}" for number in generator.permutation(count)]), np.zeros(count, np.int64),
                     np.zeros(count, np.float32), generator.integers(1, 9, count)], schema=dedup.BAND_SCHEMA)
    pairs = dedup.band_candidates(rows)
    assert count <= len(pairs) < (1 + dedup.NEIGHBOURS) * count
    assert len(dedup.cluster(pairs.append_column("score", pa.array(np.ones(len(pairs)))))) == count - 1


def test_a_chain_does_not_collapse():
    ids = [f"{number:05}" for number in range(5000)]
    chain = pa.table({"a": ids[:-1], "b": ids[1:], "score": np.full(4999, 0.8)})
    result = dedup.cluster(chain)
    assert result["id"].to_pylist() == ids[1::2]  # each is a neighbour of its survivor; union-find would drop 4,999
    assert result["survivor"].to_pylist() == ids[:-1:2]


def test_empty_tables_give_nothing_and_a_cycle_is_refused():
    empty = dedup.SCORED_EDGE_SCHEMA.empty_table()
    assert dedup.cluster(empty).equals(dedup.DROPPED_SCHEMA.empty_table())
    assert len(dedup.exact_duplicates(dedup.KEY_SCHEMA.empty_table())) == 0
    assert len(dedup.band_candidates(dedup.BAND_SCHEMA.empty_table())) == 0
    circle = pa.table({"a": ["x", "y"], "b": ["y", "x"], "score": [0.9, 0.9]})
    with pytest.raises(ValueError, match="contradict"):
        dedup.cluster(circle)
