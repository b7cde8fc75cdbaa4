"""Tests that the summary of time ledgers adds up over kills, joins and drivers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.train.time_ledger import CATEGORIES, summarise


def record(rank, generation, category, start, end):
    return {"time": end, "rank": rank, "generation": generation, "node": f"node{rank}", "category": category,
            "start": start, "end": end}


def event(time, kind, **detail):
    return {"time": time, "kind": kind, "detail": detail}


def test_seconds_of_a_kill_and_a_join_are_attributed():
    records = [
        record(0, 0, "restart", 104, 105), record(0, 0, "productive", 105, 120), record(0, 0, "detection", 120, 121),
        record(1, 0, "restart", 104, 105), record(1, 0, "productive", 105, 118),  # its last flush
        record(0, 1, "restart", 131, 132), record(0, 1, "redone", 132, 135), record(0, 1, "productive", 135, 150),
        record(0, 1, "save_stall", 150, 151),
        record(0, 2, "productive", 160, 170), record(1, 2, "productive", 160, 169)]
    events = [event(100, "driver_start", first_generation=0), event(121.5, "failure", generation=0),
              event(152, "resize", generation=1, to=2)]
    summary = summarise(records, events)
    generations = [(generation.workers, generation.start, generation.end, generation.ended_by)
                   for generation in summary.generations]
    assert generations == [(2, 100, 121.5, "failure"), (1, 121.5, 152, "resize"), (2, 152, 170, "")]
    assert summary.parts == {
        "productive": 15 + 13 + 15 + 10 + 9, "communication": 0, "redone": 3, "save_stall": 1, "data_wait": 0,
        "detection": 1.5 + 3.5,  # the survivor until the failure was detected; the lost worker since its last line
        "restart": 5 + 5 + 10.5 + 1 + 8 + 8, "idle": 1}
    assert summary.worker_seconds == 2 * 21.5 + 30.5 + 2 * 18 == pytest.approx(sum(summary.parts.values()))
    assert summary.wall_seconds == 70
    assert summary.goodput == pytest.approx(62 / summary.worker_seconds)


def test_time_between_two_drivers_is_not_counted():
    records = [record(0, 0, "productive", 10, 20), record(0, 1, "productive", 105, 110)]
    summary = summarise(records, [event(8, "driver_start"), event(100, "driver_start")])
    assert summary.wall_seconds == 12 + 10
    assert summary.parts["restart"] == 2 + 5
    assert summary.parts["productive"] == 15


def test_time_in_which_a_driver_starts_another_coordinator_counts():
    records = [record(0, 0, "productive", 10, 20), record(0, 1, "productive", 35, 40)]
    summary = summarise(records, [event(8, "driver_start"), event(24, "driver_start"), event(24, "coordinator_lost")])
    assert [(generation.start, generation.end) for generation in summary.generations] == [(8, 20), (20, 40)]
    assert summary.wall_seconds == 32
    assert summary.parts["restart"] == 2 + 15


def test_a_worker_that_never_wrote_counts_too():
    records = [record(0, 0, "productive", 0, 10)]
    summary = summarise(records, [event(1, "start", generation=0, world_size=2), event(11, "failure", generation=0)])
    assert summary.worker_seconds == 22
    assert summary.parts["detection"] == 1 + 11


def test_a_worker_that_wakes_after_it_was_cut_off_does_not_count():
    """The worker was stopped at 10, the others continued without it at 14, and it wrote its last record at 32."""
    records = [record(0, 0, "productive", 0, 13), record(1, 0, "productive", 0, 10), record(1, 0, "idle", 10, 32),
               record(0, 1, "productive", 15, 40)]
    summary = summarise(records, [event(0, "driver_start"), event(14, "failure", generation=0)])
    generations = [(generation.workers, generation.start, generation.end) for generation in summary.generations]
    assert generations == [(2, 0, 15), (1, 15, 40)]
    assert summary.wall_seconds == 40


def test_workers_that_outlive_their_driver_end_when_the_next_one_starts():
    records = [record(0, 0, "productive", 0, 25), record(0, 1, "productive", 30, 40)]
    summary = summarise(records, [event(0, "driver_start"), event(20, "driver_start")])
    assert [(generation.start, generation.end) for generation in summary.generations] == [(0, 20), (20, 40)]


def test_a_driver_that_never_had_workers_is_not_counted():
    records = [record(0, 0, "productive", 0, 10), record(0, 2, "productive", 105, 110)]
    summary = summarise(records, [event(0, "driver_start"), event(20, "driver_start"), event(100, "driver_start")])
    assert [(generation.start, generation.end) for generation in summary.generations] == [(0, 10), (100, 110)]


def test_a_run_without_records_has_no_time():
    summary = summarise([], [])
    assert summary.worker_seconds == summary.goodput == 0


@st.composite
def logs(draw):
    records, events, now = [], [event(0, "driver_start")], draw(st.floats(0, 5))
    for generation in range(draw(st.integers(1, 4))):
        ranks, last = draw(st.integers(1, 3)), now
        for rank in range(ranks):
            at = now + draw(st.floats(0, 5))
            for category in draw(st.lists(st.sampled_from(CATEGORIES), min_size=1, max_size=5)):
                start = at + draw(st.floats(-1, 2))  # gaps, and overlaps
                at = max(start, at) + draw(st.floats(0, 3))
                records.append(record(rank, generation, category, start, at))
            last = max(last, at)
        now = last + draw(st.floats(0, 2))
        kind = draw(st.sampled_from(["failure", "resize", "other"]))
        events.append(event(now, kind, generation=generation))
    return draw(st.permutations(records)), events


@given(logs())
def test_the_parts_sum_to_the_time_workers_ran(both):
    summary = summarise(*both)
    assert sum(summary.parts.values()) == pytest.approx(summary.worker_seconds, abs=1e-6)
    assert 0 <= summary.goodput <= 1
    by_worker = {}
    for part in summary.records:
        by_worker.setdefault((part["generation"], part["rank"]), []).append((part["start"], part["end"]))
    for intervals in by_worker.values():
        assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(intervals))  # no gap, no overlap
