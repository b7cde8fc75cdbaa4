"""Counts by source add up for any split of the documents, and stay bounded."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.data.stages import by_source

DOCUMENTS = st.lists(st.tuples(st.sampled_from(["a", "b", "c/d", ""]), st.integers(0, 1000)), max_size=40)


def tally(documents):
    return by_source.tally(pa.array([name for name, _ in documents], pa.string()),
                           pa.array([size for _, size in documents], pa.int64()))


@settings(deadline=None)
@given(DOCUMENTS, st.integers(0, 40))
def test_any_split_gives_the_same_counts(documents, at):
    whole = tally(documents)
    assert by_source.merge([tally(documents[:at]), tally(documents[at:])]) == whole
    assert by_source.total(whole) == (len(documents), sum(size for _, size in documents))


def test_small_sources_are_added_up():
    results = {f"s{number:03d}": [number, 10 * number] for number in range(1, 6)}
    assert by_source.largest(results, 2) == {"(other sources)": [6, 60], "s004": [4, 40], "s005": [5, 50]}


def test_a_unit_lists_a_bounded_number_of_sources():
    counts = tally([(f"{number}", 1) for number in range(5000)])
    assert len(counts) == by_source.UNIT_SOURCES + 1
    assert by_source.total(counts) == (5000, 5000)


def test_all_stages_list_the_same_sources():
    first = {f"s{number:03d}": [number + 1, 1] for number in range(100)}
    stages = by_source.by_stage([("ingest", first), ("filter", {"s000": [1, 1], "s099": [50, 1]})])
    assert [stage["stage"] for stage in stages] == ["ingest", "filter"]
    assert len(stages[0]["left"]) == by_source.REPORT_SOURCES + 1
    assert stages[1]["left"] == {"(other sources)": [1, 1], "s099": [50, 1]}
    assert by_source.by_stage([]) == []
