import pytest

from tidewheel import jsonlog
from tidewheel.elastic.coordinator import Coordinator, RunState, actor_name
from tidewheel.elastic.policy import HoldState
from tidewheel.storage import store


def test_question_and_answer():
    run = RunState()
    generation = run.begin(2)
    assert not run.wanted(generation)
    run.ask(generation)
    assert run.wanted(generation)
    run.held(generation, 40)
    assert run.snapshot().hold is HoldState.HELD
    assert run.snapshot().held_step == 40
    assert run.holding(generation)  # until the worker is replaced ...
    run.release(generation)
    assert not run.holding(generation)  # ... or the change is called off
    assert run.snapshot().held_step is None


def test_what_an_older_generation_says_changes_nothing():
    run = RunState()
    old, new = run.begin(2), run.begin(1)
    run.ask(old)
    run.held(old, 3)
    run.step(old, {"step": 99})
    assert not run.wanted(old)
    assert run.snapshot().hold is HoldState.NONE
    assert run.snapshot().furthest_step == 0
    assert run.holding(old)  # it is about to be ended: it must not go on training
    run.step(new, {"step": 1})
    assert run.snapshot().stepped


def test_a_hold_that_nobody_asked_for_is_not_one():
    run = RunState()
    generation = run.begin(1)
    run.held(generation, 5)
    assert run.snapshot().hold is HoldState.NONE


def test_the_furthest_step_outlives_generations():
    run = RunState()
    run.step(run.begin(2), {"step": 12})
    run.step(run.begin(1), {"step": 10})
    assert run.snapshot().furthest_step == 12
    assert run.snapshot().progress["step"] == 10


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)


def test_a_new_driver_goes_on_counting(tmp_path, quiet):
    first = Coordinator(str(tmp_path))
    first.event("resume", {"generation": first.begin(2), "step": 0})
    first.event("failure", {"generation": first.begin(1)})
    first.end()
    (tmp_path / "batches.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    second = Coordinator(str(tmp_path))
    assert second.begin(2) == 2
    assert second.snapshot().furthest_step == 8
    kinds = [event["kind"] for event in jsonlog.read(store(tmp_path), "events.jsonl")]
    assert kinds == ["driver_start", "resume", "failure", "driver_start"]


def test_names_differ_by_run():
    assert actor_name("/a/runs/x") == actor_name("/a/runs/x") != actor_name("/a/runs/y")
