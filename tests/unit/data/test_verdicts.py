"""Verdict tables, samples, and the hash of ids that decides partitions and splits."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data import verdicts

IDS = [f"doc-{number:04d}" for number in range(500)]


def table(ids, reason="why"):
    return verdicts.drops(pa.array(ids, pa.string()), reason, survivors=["s"] * len(ids), scores=[0.5] * len(ids))


def test_rows_are_sorted_and_encode_to_the_same_bytes():
    one, other = table(IDS), table(IDS[::-1])
    assert one.schema == verdicts.VERDICT_SCHEMA
    assert verdicts.encode(one) == verdicts.encode(other)
    assert verdicts.encode(pa.concat_tables([one.slice(0, 3), one.slice(3)])) == verdicts.encode(one)
    assert verdicts.decode(verdicts.encode(one)).equals(one.combine_chunks())
    assert verdicts.decode(verdicts.encode(one), ["id"]).column_names == ["id"]


def test_without_removes_all_named_rows():
    documents = pa.table({"id": IDS})
    kept = verdicts.without(documents, [pa.array(IDS[:10]), pa.chunked_array([IDS[20:30], IDS[40:50]]), pa.array(
        [], pa.string())])
    assert kept["id"].to_pylist() == IDS[10:20] + IDS[30:40] + IDS[50:]
    assert verdicts.without(documents, []).equals(documents)


@given(cuts=st.lists(st.integers(0, 500), max_size=6))
@settings(max_examples=30, deadline=None)
def test_samples_do_not_depend_on_the_split_of_the_work(cuts):
    documents = pa.table({"id": IDS, "text": [f"text of {name} " * 40 for name in IDS]})
    bounds = [0, *sorted(cuts), 500]
    parts = [verdicts.samples(table(IDS[a:b]), documents) for a, b in itertools.pairwise(bounds) if b > a]
    whole = verdicts.merge_samples([verdicts.samples(table(IDS), documents)])
    assert verdicts.merge_samples(parts) == whole
    assert len(whole["why"]) == verdicts.SAMPLES
    for row in whole["why"]:
        assert row["text"] == (f"text of {row['id']} " * 40)[:200]
        assert row["survivor"] == "s"
        assert "order" not in row


def test_counts_by_reason():
    both = pa.concat_tables([table(IDS[:3], "b"), table(IDS[3:10], "a")])
    assert verdicts.counts(both) == {"a": 7, "b": 3}
    assert verdicts.counts(verdicts.VERDICT_SCHEMA.empty_table()) == {}


@given(ids=st.lists(st.text(max_size=20), max_size=50), partitions=st.integers(1, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_partitions_are_ranges_of_the_hash(ids, partitions):
    hashes = verdicts.hash_ids(ids)
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(document_id.encode()) for document_id in ids]
    result = verdicts.partition_of(hashes, partitions)
    assert result.dtype == np.int32
    assert result.tolist() == [(int(value) >> 32) * partitions >> 32 for value in hashes]
    order = np.argsort(hashes)
    assert np.all(np.diff(result[order]) >= 0)


def test_partitions_are_even():
    result = verdicts.partition_of(verdicts.hash_ids([f"id-{number}" for number in range(20_000)]), 16)
    sizes = np.bincount(result, minlength=16)
    assert sizes.min() > 0.9 * 20_000 / 16
    assert sizes.max() < 1.1 * 20_000 / 16


def test_seeds_give_different_hashes():
    assert verdicts.hash_ids(IDS, 1).tolist() != verdicts.hash_ids(IDS, 2).tolist()
    assert verdicts.hash_ids(pa.array(IDS)).tolist() == verdicts.hash_ids(IDS).tolist()


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_small_tables(count):
    rows = table(IDS[:count])
    assert len(verdicts.decode(verdicts.encode(rows))) == count


def test_edits_are_not_drops_and_rows_of_an_id_keep_their_order():
    edits = verdicts.rows(verdicts.EDIT, pa.array(["b", "a"]), ["later", "first"], details=['{"n": 1}', ""])
    drops = verdicts.drops(pa.array(["a"]), "why")
    merged = verdicts.merge([edits, drops, verdicts.rows(verdicts.KEEP, pa.array(["a", "c"]), "seen")])
    assert [(row["id"], row["verdict"]) for row in merged.to_pylist()] == [
        ("a", "edit"), ("a", "drop"), ("a", "keep"), ("b", "edit"), ("c", "keep")]
    assert verdicts.dropped_ids(merged).to_pylist() == ["a"]
    assert verdicts.edited(merged) == 1
    assert verdicts.counts(merged) == {"why": 1}
    assert verdicts.counts(merged, verdicts.EDIT) == {"first": 1, "later": 1}
    assert verdicts.merge([]).equals(verdicts.VERDICT_SCHEMA.empty_table())
    assert verdicts.edited(verdicts.merge([])) == 0


@given(st.text(max_size=500), st.text(max_size=500), st.text(max_size=500))
@settings(max_examples=100)
def test_samples_of_an_edit_show_its_beginning(start, one, other):
    before, after = verdicts.change(start + one, start + other)
    assert len(before) <= verdicts.SAMPLE_CHARACTERS >= len(after)
    assert before in start + one
    assert after in start + other
    if start + one != start + other and len(start) < 160:
        assert before != after
