"""What each event cost, by hand."""

from __future__ import annotations

import pytest

from tidewheel.report.disturbances import disturbance_table, disturbances
from tidewheel.report.events import Event, read_events


def record(time: float, kind: str, **detail: object) -> dict:
    return {"time": time, "kind": kind, "detail": detail}


EVENTS = [
    record(0, "driver_start"), record(4, "start", step=0, world_size=3),
    record(20.5, "node_lost", node="a"), record(21, "failure", generation=0, ranks=[2]),
    record(26, "resume", step=10, world_size=2, redo=6),
    record(40, "node_joined", node="b"), record(42, "resize", to=3),
    record(45, "resume", step=30, world_size=3, redo=0), record(60, "finish", step=45)]
STEPS = [(5 + number, 1 + number) for number in range(16)] + [(27 + number, 11 + number) for number in range(15)] + [
    (46 + number, 31 + number) for number in range(14)]
METRICS = [{"time": float(time), "step": step, "loss": 1.0} for time, step in STEPS]


def spent(category: str, start: float, end: float, ranks: int) -> list[dict]:
    return [{"rank": rank, "generation": 0, "node": str(rank), "category": category, "start": start, "end": end}
            for rank in range(ranks)]


LEDGER = [*spent("restart", 0, 4, 3), *spent("detection", 20, 21, 3), *spent("restart", 21, 26, 2),
          *spent("redone", 26, 32, 2), *spent("restart", 42, 45, 3)]


def test_one_row_for_what_belongs_together():
    start, lost, joined = disturbances(read_events(EVENTS, METRICS, LEDGER), METRICS)
    assert [item.name for item in (start, lost, joined)] == ["driver started", "node lost", "join"]
    assert [item.workers for item in (start, lost, joined)] == [(0, 3), (3, 2), (2, 3)]
    assert (start.pause, lost.redone, joined.redone) == (5.0, 6, 0)
    assert lost.pause == pytest.approx(27 - 20)
    assert joined.pause == pytest.approx(46 - 41)
    assert lost.cost == pytest.approx({"detection": 3, "restart": 10, "redone": 12})
    assert joined.cost == pytest.approx({"restart": 9})


def test_nothing_of_the_ledger_is_counted_twice_or_forgotten():
    result = disturbances(read_events(EVENTS, METRICS, LEDGER), METRICS)
    whole = sum(part["end"] - part["start"] for part in LEDGER)
    assert sum(sum(item.cost.values()) for item in result) == pytest.approx(whole)
    table = disturbance_table(result, 0.0)
    assert "46.0 s" in table
    assert table.count("<tr>") == 1 + 3 + 1


def test_a_second_failure_before_the_first_is_mended_is_the_same_row():
    events = [Event(0, "driver_start", {}), Event(1, "start", {"world_size": 2}), Event(5, "failure", {}),
              Event(7, "failure", {}), Event(9, "resume", {"world_size": 2, "redo": 3})]
    result = disturbances(events, [{"time": float(at), "step": at, "loss": 1.0} for at in (2, 3, 4, 10)])
    failures = [(item.name, item.kinds.count("failure")) for item in result]
    assert failures == [("driver started", 0), ("worker failed", 2)]
    assert (result[1].pause, result[1].redone) == (6.0, 3)
    assert disturbance_table([], 0.0) == ""
