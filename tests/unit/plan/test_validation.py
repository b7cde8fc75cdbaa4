"""A run made up to the second, and what the simulator says of it."""

import pytest

from tidewheel import jsonlog
from tidewheel.errors import ConfigError
from tidewheel.plan.validation import observe, predicted_beside_measured
from tidewheel.storage import Store, store

STEP, DETECT, RESTART, STALL = 1.0, 2.0, 8.0, 0.5


def made_up(place: Store, steps: int, fail_after: tuple[int, ...], workers: int = 2) -> None:
    """A save every 10 steps; the run fails half a step after those in `fail_after`."""
    place.write_json("run.json", {"config": {"steps": steps, "checkpoint": {"every_steps": 10}}})
    log = {name: jsonlog.JsonLog(place, f"{name}.jsonl") for name in ("events", "ledger", "batches")}
    now, generation, at, saved, seen = 1000.0, 0, 0, 0, 0
    failures = list(fail_after)

    def spent(category: str, seconds: float) -> None:
        nonlocal now
        for rank in range(workers):
            log["ledger"].append({"rank": rank, "generation": generation, "node": f"n{rank}", "category": category,
                                  "start": now, "end": now + seconds, "time": now})
        now += seconds

    def event(kind: str, **detail: object) -> None:
        log["events"].append({"time": now, "kind": kind, "detail": {"generation": generation, **detail}})

    event("driver_start")
    spent("restart", RESTART)
    event("start", world_size=workers)
    while at < steps:
        at += 1
        spent("redone" if at <= seen else "productive", STEP)
        log["batches"].append({"step": at, "generation": generation})
        seen = max(seen, at)
        if at % 10 == 0:
            spent("save_stall", STALL)
            event("save", step=at)
            event("commit", step=at, seconds=STALL, stall_seconds=STALL)
            saved = at
        if failures and at == failures[0]:
            failures.pop(0)
            spent("detection", STEP / 2 + DETECT)  # the half step is lost with the worker
            event("failure", restart=True)
            generation, at = generation + 1, saved
            spent("restart", RESTART)
            event("resume", step=at, world_size=workers)


def test_constants_are_read_from_a_run(tmp_path):
    run_store = store(tmp_path / "run")
    made_up(run_store, 100, (15, 47))
    result = observe(run_store)
    assert (result.workers, result.every_steps, result.refresh_steps) == (2, 10, 0)
    assert result.tier.detect_seconds == pytest.approx(DETECT + STEP / 2)
    assert result.tier.restart_seconds == pytest.approx(RESTART)
    assert result.tier.save_stall_seconds == pytest.approx(STALL)
    assert result.step_seconds == pytest.approx(STEP)
    wall = 100 + 12 + 10 * STALL + 2 * (RESTART + DETECT + STEP / 2)
    assert result.seconds == pytest.approx(wall)
    assert result.goodput == pytest.approx(100 / wall)


def test_the_prediction_is_the_run(tmp_path):
    """With constants of another run of the same kind, whose failures came elsewhere."""
    for name, steps, failures in (("a", 100, (15, 47)), ("b", 150, (9, 61, 62, 118)), ("c", 60, ())):
        made_up(store(tmp_path / name), steps, failures)
    lines = predicted_beside_measured([str(tmp_path / name) for name in "ab"])
    assert [line["failures"] for line in lines] == [2, 4]
    assert all(abs(float(line["difference"])) < 0.6 for line in lines), lines
    [alone] = predicted_beside_measured([str(tmp_path / "c")])
    assert abs(float(alone["difference"])) < 0.01


def test_what_cannot_be_compared_is_said(tmp_path):
    run_store = store(tmp_path / "run")
    run_store.write_json("run.json", {"config": {"checkpoint": {"every_steps": 10}}})
    with pytest.raises(ConfigError, match="not done a step"):
        observe(run_store)
    made_up(run_store, 20, ())
    jsonlog.JsonLog(run_store, "events.jsonl").append({"time": 1030.0, "kind": "resize", "detail": {"generation": 0}})
    with pytest.raises(ConfigError, match="resized"):
        observe(run_store)
